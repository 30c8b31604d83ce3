"""Ranks whose models differ hear how, in training and in broadcasts, and may go on afterwards."""

import re
from functools import partial

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError, MismatchError, RefusedCallError
from tests.checks import each_check
from tests.hvd_cluster.torch.training import with_and_without_a_core_to_spare


def models():
    """Case -> the layers of the first rank, and of the others."""
    body, out, head = (lambda: torch.nn.Linear(4, 8)), (lambda: torch.nn.Linear(8, 3)), (lambda: torch.nn.Linear(8, 2))
    usual = {"body": body, "out": out}
    only = r"'head\.\w+', float32 of shape \(2,.*\), is on rank 0 only"
    return {
        "last": ({**usual, "head": head}, usual, only),
        "first": ({"head": head, **usual}, usual, only),
        "order": (
            {"out": out, "body": body},
            usual,
            r"number 0 is 'out\.weight', float32 of shape \(3, 8\), on rank 0, 'body\.weight'",
        ),
        "size": ({"body": body, "out": lambda: torch.nn.Linear(8, 5)}, usual, r"'out\.\w+', number \d, is float32"),
        "dtype": ({"body": lambda: body().double(), "out": out}, usual, r"'body\.\w+', number 0, is float64"),
    }


def built(first, others):
    torch.manual_seed(3)
    layers = first if hvd.rank() == 0 else others
    return torch.nn.ModuleDict({name: make() for name, make in layers.items()})


def step(model, optimizer):
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()


def same_text(call):
    with pytest.raises(MismatchError) as caught:
        call()
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
    return str(caught.value)


def check_optimizers():
    def check():
        for op in (hvd.Average, hvd.Adasum) if hvd.size() == 2 else (hvd.Average,):
            for case, (first, others, said) in models().items():
                if op is hvd.Adasum and case == "dtype":
                    continue
                model = built(first, others)
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=op
                )
                for _ in range(2):
                    assert re.search(said, same_text(partial(step, model, optimizer)))
                del optimizer
                model = built(others, others)
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
                step(model, optimizer)
                del optimizer

    if hvd.size() > 1:
        with_and_without_a_core_to_spare(check)


def check_other_groups():
    model = built(models()["size"][1], models()["size"][1])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=1 + hvd.rank())
    if hvd.size() > 1:
        assert "groups=1 on rank 0, groups=2 on rank 1" in same_text(lambda: step(model, optimizer))


def check_other_names_do_no_harm():
    """Such as those of a model in DistributedDataParallel on some ranks."""

    def check():
        model = built(models()["size"][1], models()["size"][1])
        prefix = "module." if hvd.rank() else ""
        named = [(prefix + name, each) for name, each in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named, op=hvd.Sum)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(2):
            step(model, optimizer)
        for parameter, start in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), start - 2 * hvd.size())
        hvd.broadcast_parameters(dict(named), 0)

    with_and_without_a_core_to_spare(check)


def check_broadcasts():
    for case, (first, others, said) in models().items() if hvd.size() > 1 else ():
        for give in (lambda m: m.named_parameters(), lambda m: m.state_dict()):
            model = built(first, others)
            if case == "order":  # they are matched by name
                hvd.broadcast_parameters(give(model), 0)
                continue
            with pytest.raises(MismatchError, match=said):
                hvd.broadcast_parameters(give(model), 0)
        model = built(others, others)
        hvd.broadcast_parameters(model.state_dict(), 0)


def check_refused_tensor():
    """The others hear of it; the corrected call works, and all other tensors are not in flight any more."""
    tensors = [torch.full((3,), float(hvd.rank() + number)) for number in range(4)]
    expanded = torch.zeros(1).expand(3)
    for place in range(4) if hvd.size() > 1 else ():
        given = list(tensors)
        if hvd.rank() == 1:
            given[place] = expanded
        with pytest.raises(InvalidRequestError if hvd.rank() == 1 else RefusedCallError, match=f"parameter.{place}"):
            hvd.broadcast_parameters(given, 0)
        hvd.broadcast_parameters(tensors, 0)
        assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0, 3.0]


def check_refused_list():
    if hvd.size() > 1:
        wrong = hvd.rank() == 1
        with pytest.raises(InvalidRequestError if wrong else RefusedCallError):
            hvd.broadcast_parameters({"a": 3} if wrong else {"a": torch.ones(2)}, 0)
        hvd.broadcast_parameters({"a": torch.ones(2)}, 0)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
