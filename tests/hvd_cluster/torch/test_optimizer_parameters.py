"""DistributedOptimizer: parameters and the memory of their gradients."""

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.checks import each_check
from tests.hvd_cluster.torch.training import (
    assert_identical_everywhere,
    build,
    data,
    flat,
    loss_of,
    own,
    sgd,
    with_and_without_a_core_to_spare,
)


def check_names_of_parameters():
    model = build()
    for op in (hvd.Average, hvd.Adasum if hvd.size() != 3 else hvd.Sum):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=op)
        assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
        del optimizer
    unnamed = hvd.DistributedOptimizer(sgd([next(model.parameters())]))
    assert list(unnamed._parameter_names.values()) == ["allreduce.noname.0.0"]


def check_param_groups_that_are_exchanged():
    first, second = build(), build()
    both = torch.nn.ModuleList([first, second])
    optimizer = hvd.DistributedOptimizer(sgd(first.parameters()), both.named_parameters())
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(second.parameters())})
    loss_of(second, *(own(rows) for rows in data(0))).backward()
    optimizer.step()
    assert not torch.equal(flat(second), flat(build()))
    assert_identical_everywhere(second)


def check_parameters_that_are_removed():
    """A removed parameter does not change any more; new parameters get names that are unique."""

    def check():
        sizes = (3, 40_000, 5, 40_000, 7)
        first, second, third, fourth, fifth = (torch.nn.Parameter(torch.zeros(size)) for size in sizes)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([{"params": [first, second]}, {"params": [third]}], lr=1.0)
        )

        def step(*parameters):
            optimizer.zero_grad()
            for parameter in parameters:
                (parameter * (hvd.rank() + 1)).sum().backward()
            optimizer.step()

        step(first, second, third)
        first.grad = second.grad = None
        del optimizer.param_groups[0]
        optimizer.add_param_group({"params": [fourth]})
        optimizer.add_param_group({"params": [fifth]})
        step(first, second, third, fourth, fifth)
        assert first.grad.tolist() == [hvd.rank() + 1] * 3
        if hvd.size() > 1:
            names = optimizer._combiner.inventory.names.values()
            assert sorted(names) == [f"allreduce.noname.{number}.0" for number in range(3)]
            assert set(optimizer._combiner.buckets) == {third, fourth, fifth}
        mean = (hvd.size() + 1) / 2
        for parameter, steps in ((first, 1), (second, 1), (third, 2), (fourth, 1), (fifth, 1)):
            assert parameter[0].item() == -mean * steps

    with_and_without_a_core_to_spare(check)


def check_parameters_added_and_unfrozen_later():
    first, second, third = (torch.nn.Linear(2, 2) for _ in range(3))
    model = torch.nn.ModuleList([first, second, third])
    hvd.broadcast_parameters(model.state_dict(), 0)
    second.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    second.requires_grad_(True)
    optimizer.add_param_group({"params": list(third.parameters())})
    for step in range(3):
        optimizer.zero_grad()
        third(second(first(torch.full((1, 2), float(hvd.rank() + step))))).sum().backward()
        optimizer.step()
    assert_identical_everywhere(model)


def check_gradients_in_memory_of_the_user():
    """Small and large gradients stay in that memory."""
    for rows in (2, 300):
        flat_gradients = torch.zeros(2 * rows * rows)
        parameters = [torch.nn.Parameter(torch.zeros(rows, rows)) for _ in range(2)]
        for parameter, part in zip(parameters, flat_gradients.split(rows * rows), strict=True):
            parameter.grad = part.view(rows, rows)
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            inner = torch.optim.SGD(parameters, lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner, compression=compression, op=hvd.Sum)
            flat_gradients.zero_()
            optimizer.zero_grad(set_to_none=False)
            (parameters[0].sum() + 2 * parameters[1].sum()).backward()
            optimizer.synchronize()
            expected = torch.tensor([hvd.size(), 2 * hvd.size()]).repeat_interleave(rows * rows).float()
            assert torch.equal(flat_gradients, expected)
            del optimizer


def check_gradients_that_share_memory():
    """autograd gives both parameters the same memory as gradient, which must not be summed twice."""
    for rows in (2, 300):
        a, b = (torch.nn.Parameter(torch.ones(rows, rows)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], op=hvd.Sum)
        weight = torch.arange(float(rows * rows))
        ((a.view(-1) + b.view(-1)) * weight).sum().backward()
        optimizer.synchronize()
        expected = weight.view(rows, rows) * hvd.size()
        assert torch.equal(a.grad, expected)
        assert torch.equal(b.grad, expected)


def check_unused_parameter():
    """A gradient that some ranks, or all, do not have counts as zeros."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "rank0": torch.nn.Linear(2, 2)})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = model["rank0"].bias.detach().clone()
    output = model["used"](torch.ones(1, 2))
    if hvd.rank() == 0:
        output = output + model["rank0"](torch.ones(1, 2))
    output.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model["rank0"].bias.detach(), before - 1.0 / hvd.size())


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
