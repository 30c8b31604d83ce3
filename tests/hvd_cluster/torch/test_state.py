"""The same start everywhere: broadcast_parameters, and broadcast_optimizer_state for every optimizer of torch."""

import copy
import inspect
from difflib import Match

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError, MismatchError
from tests.checks import each_check

OPTIMIZERS = [
    value
    for _, value in sorted(vars(torch.optim).items())
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
]
EMPTY, EVERYBODY = inspect.Parameter.empty, ("process_set", hvd.global_process_set)
MATRICES_ONLY = {"Muon"}


def numbers(seed, *shape):
    """The same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(kind, **options):
    shapes = [(4, 3), (2, 2)] if kind.__name__ in MATRICES_ONLY else [(4, 3), (5,)]
    return kind([torch.nn.Parameter(numbers(9, *shape)) for shape in shapes], **options)


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def train(optimizer, steps, sparse=False):
    """Minimize the squared distance of the parameters from some targets, with the same gradients on all ranks."""

    def closure():
        loss = torch.zeros(())
        for seed, parameter in enumerate(parameters_of(optimizer)):
            difference = parameter.detach() - numbers(seed, *parameter.shape).to(parameter.dtype)
            parameter.grad = difference.to_sparse() if sparse else difference.clone()
            loss += difference.square().sum()
        return loss / 2

    for _ in range(steps):
        optimizer.step(closure)


def comparable(optimizer):
    state_dict = copy.deepcopy(optimizer.state_dict())
    for group in state_dict["param_groups"]:
        group.pop("param_names", None)
    return state_dict


def assert_same_everywhere(value, root=0):
    everybody = hvd.allgather_object(value)
    torch.testing.assert_close(everybody, [everybody[root]] * hvd.size(), rtol=0, atol=0)


def check_every_optimizer_of_torch():
    """One rank restored and the others fresh, then the other way round; all go on as the root would have alone."""
    for kind in OPTIMIZERS:
        sparse = kind is torch.optim.SparseAdam
        for root, is_trained in ((hvd.size() - 1, hvd.rank() == hvd.size() - 1), (0, hvd.rank() != 0)):
            optimizer = make(kind)
            if is_trained:
                train(optimizer, 3, sparse)
                optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 1.5
            before = comparable(optimizer)
            hvd.broadcast_parameters(parameters_of(optimizer), root)
            hvd.broadcast_optimizer_state(optimizer, root)
            assert_same_everywhere(comparable(optimizer), root)
            if hvd.rank() == root:
                torch.testing.assert_close(comparable(optimizer), before, rtol=0, atol=0)
            train(optimizer, 2, sparse)
            assert_same_everywhere((comparable(optimizer), parameters_of(optimizer)), root)


def check_every_wrapped_optimizer():
    for kind in OPTIMIZERS:
        optimizer = make(kind)
        if hvd.rank() == 0:
            train(optimizer, 3, sparse=kind is torch.optim.SparseAdam)
            optimizer.param_groups[0]["lr"] = 0.125
        wrapped = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_optimizer_state(wrapped, 0)
        assert_same_everywhere(comparable(wrapped))
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert type(wrapped).__name__ == kind.__name__


OPTIONS = {
    "tensor": (torch.optim.Adam, lambda rank: {"lr": torch.tensor(0.5 + rank), "betas": (0.5, 0.5 + rank / 10)}),
    "flags": (torch.optim.Adam, lambda rank: {"foreach": rank == 0, "amsgrad": rank == 0, "maximize": rank == 0}),
    "fused": (torch.optim.AdamW, lambda rank: {"fused": rank == 0}),
    "stateless": (torch.optim.SGD, lambda rank: {"lr": 0.5 + rank, "nesterov": rank == 0, "momentum": 0.5}),
    "none": (torch.optim.SGD, lambda rank: {"lr": 0.5 + rank, "foreach": None if rank == 0 else True}),
}


def check_options():
    for kind, give in OPTIONS.values():
        optimizer = make(kind, **give(hvd.rank()))
        for _ in range(2):
            hvd.broadcast_optimizer_state(optimizer, 0)
            for key, value in give(0).items():
                assert optimizer.param_groups[0][key] == value
                assert type(optimizer.param_groups[0][key]) is type(value)
            train(optimizer, 1)
            assert_same_everywhere((comparable(optimizer), parameters_of(optimizer)))


def check_flags_of_a_trained_optimizer():
    optimizer = make(torch.optim.Adam)
    if hvd.rank() == 0:
        train(optimizer, 1)
        optimizer.param_groups[0].update(capturable=True, foreach=True)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert (optimizer.param_groups[0]["capturable"], optimizer.param_groups[0]["foreach"]) == (True, True)
    assert {type(state["step"]) for state in optimizer.state.values()} == {torch.Tensor}
    assert_same_everywhere(comparable(optimizer))


def check_groups_with_options_of_their_own():
    first, second = (torch.nn.Parameter(numbers(seed, 3)) for seed in range(2))
    optimizer = torch.optim.SGD(
        [
            {"params": [first], "param_names": ["first"]},
            {"params": [second], "param_names": ["second"], "lr": 0.5 + hvd.rank()},
        ],
        lr=0.1,
        momentum=0.9,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    if hvd.rank() == 0:
        train(optimizer, 1)
        scheduler.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.05])
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [group["param_names"] for group in optimizer.param_groups] == [["first"], ["second"]]
    assert set(optimizer.state) == {first, second}


def check_state_keeps_its_layout_and_dtype():
    """Fused kernels refuse a state that is laid out otherwise than its parameter."""
    parameter = torch.nn.Parameter(numbers(0, 4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([parameter], fused=True)
    if hvd.rank() == 0:
        train(optimizer, 1)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.state[parameter]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    train(optimizer, 1)
    assert_same_everywhere(comparable(optimizer))

    half = torch.nn.Parameter(numbers(0, 4).bfloat16())
    optimizer = torch.optim.Adam([half])
    if hvd.rank() == 0:
        train(optimizer, 1)
        optimizer.state[half]["exp_avg"] = numbers(1, 4)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert torch.equal(optimizer.state[half]["exp_avg"], numbers(1, 4))
    assert optimizer.state[half]["exp_avg_sq"].dtype == torch.bfloat16


def check_odd_state():
    """Sparse momentum, nested containers, named tuples, and state that belongs to no parameter."""
    optimizer = make(torch.optim.SGD, momentum=0.9)
    if hvd.rank() == 0:
        train(optimizer, 2, sparse=True)
        optimizer.state[parameters_of(optimizer)[0]]["history"] = [
            numbers(1, 2),
            None,
            (3, {"x": numbers(2, 2).half()}),
        ]
        optimizer.state[parameters_of(optimizer)[1]]["match"] = Match(numbers(4, 2), [numbers(5, 2)], 3)
        optimizer.state["shared"] = {"count": 7, "total": numbers(3, 3).double(), "scale": Match(1, 2, numbers(6, 1))}
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert_same_everywhere(comparable(optimizer))
    assert optimizer.state[parameters_of(optimizer)[0]]["momentum_buffer"].is_sparse
    assert optimizer.state[parameters_of(optimizer)[0]]["history"][2][1]["x"].dtype == torch.half
    assert optimizer.state["shared"]["total"].dtype == torch.double
    match = optimizer.state[parameters_of(optimizer)[1]]["match"]
    assert (type(match), match.size, type(optimizer.state["shared"]["scale"])) == (Match, 3, Match)
    assert torch.equal(match.b[0], numbers(5, 2))


class Unready(torch.optim.SGD):
    """Has no state to give, on rank 0."""

    def state_dict(self):
        if hvd.rank() == 0:
            raise RuntimeError("the swap file is gone")
        return super().state_dict()


def check_a_state_that_cannot_be_read():
    """All ranks hear why, and what the root raised is there, on the root."""
    hooked = make(torch.optim.SGD)
    if hvd.rank() == 0:
        hooked.register_state_dict_post_hook(lambda optimizer, state_dict: {}["gone"])
    for optimizer, reason in (
        (make(Unready), r"the Unready cannot be read .*the swap file is gone\)"),
        (
            hvd.DistributedOptimizer(make(Unready)),
            r"the Unready cannot be read \(RuntimeError: the swap file is gone\)",
        ),
        (hooked, r"the SGD cannot be read \(KeyError: 'gone'\)"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^rank 0: the state of {reason}$") as caught:
            hvd.broadcast_optimizer_state(optimizer, 0)
        assert isinstance(caught.value.__cause__, RuntimeError | KeyError) == (hvd.rank() == 0)
        hvd.broadcast_optimizer_state(make(torch.optim.SGD), 0)
        assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_optimizers_that_do_not_fit():
    """Only ranks that cannot take the state fail, and only after all have met."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(1 + min(hvd.rank(), 1))])
    if hvd.rank() == 0:
        hvd.broadcast_optimizer_state(optimizer, 0)
    else:
        with pytest.raises(ValueError, match="size of optimizer's group"):
            hvd.broadcast_optimizer_state(optimizer, 0)
    for wrong in (torch.nn.Linear(1, 1), None, optimizer.state_dict()):
        with pytest.raises(InvalidRequestError, match=r"optimizer is a \w+; give a torch\.optim\.Optimizer"):
            hvd.broadcast_optimizer_state(wrong, 0)
    optimizer.param_groups[0]["lr"] = (rate for rate in (0.1, 0.2))
    with pytest.raises(InvalidRequestError, match="rank 0: an object of type dict cannot be pickled"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.barrier()


def model():
    torch.manual_seed(hvd.rank())
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))


FORMS = [
    lambda module: module.state_dict(),
    lambda module: dict(reversed(module.state_dict().items())) if hvd.rank() else module.state_dict(),
    lambda module: {**module.state_dict(), "absent": None},
    lambda module: module.named_parameters(),
    lambda module: list(module.named_parameters())[:: -1 if hvd.rank() else 1],
    lambda module: module.parameters(),
    lambda module: [*module.parameters(), None],
]


def check_parameters_in_any_form():
    for form in FORMS:
        root, module = hvd.size() - 1, model()
        before = copy.deepcopy(dict(module.named_parameters()))
        hvd.broadcast_parameters(form(module), root_rank=root)
        parameters = dict(module.named_parameters())
        assert_same_everywhere(parameters, root)
        if hvd.rank() == root:
            torch.testing.assert_close(parameters, before, rtol=0, atol=0)
        assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters.values())
    hvd.broadcast_parameters({}, 0)


def check_tensors_of_any_kind():
    rank = hvd.rank()
    tensors = {
        "scalar": torch.tensor(rank),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([rank == 0]),
        "half": torch.full((3,), rank, dtype=torch.bfloat16),
        "channels last": torch.full((2, 3, 4, 4), rank).to(memory_format=torch.channels_last),
        "transposed": torch.full((3, 2), rank).t(),
        "strided": torch.full((6,), rank)[::2],
        3: torch.tensor([rank]),
    }
    hvd.broadcast_parameters(tensors, 0)
    assert all((tensor == (name == "bool")).all() for name, tensor in tensors.items())
    assert tensors["channels last"].is_contiguous(memory_format=torch.channels_last)


def check_objects_that_are_no_parameters():
    module = model()
    for wrong in (3, "abc", None, torch.ones(2), module[0]):
        with pytest.raises(InvalidRequestError, match=r"params is a \w+; give model\.state_dict"):
            hvd.broadcast_parameters(wrong, 0)
    extra = {**module.state_dict(), "1._extra_state": {"scale": 2}}
    for wrong in (extra, ["name"], [("name", 3)], module, [torch.ones(1), 2.5]):
        with pytest.raises(InvalidRequestError, match=r"params\[.*\] is a \w+; only tensors are overwritten in place"):
            hvd.broadcast_parameters(wrong, 0)
    hvd.barrier()


def check_parameters_that_differ():
    """The names of those that agree are free again, at once."""
    if hvd.size() == 1:
        return
    for _ in range(20):
        tensors = {
            "same": torch.ones(3),
            "shape": torch.ones(2 + hvd.rank()),
            "type": torch.ones(2),
            "z": torch.ones(9),
        }
        tensors["type"] = tensors["type"].to([torch.float32, torch.float64][hvd.rank() % 2])
        with pytest.raises(MismatchError, match=r"'shape', number 1, is float32 of shape \(2,\) on rank 0"):
            hvd.broadcast_parameters(tensors, 0)


def check_process_sets():
    if hvd.size() < 3:
        return
    some = hvd.add_process_set([0, 2])
    optimizer = make(torch.optim.Adam, lr=1 + hvd.rank())
    if hvd.rank() == 2:
        train(optimizer, 1)
    if some.included():
        values = torch.full((2,), hvd.rank())
        hvd.broadcast_parameters([values], 2, process_set=some)
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=some)
        assert values.tolist() == [2, 2]
        assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == (3, 2)
    else:
        for call in (
            lambda: hvd.broadcast_parameters([torch.ones(1)], 2, process_set=some),
            lambda: hvd.broadcast_optimizer_state(optimizer, 2, process_set=some),
        ):
            with pytest.raises(InvalidRequestError, match="not a member"):
                call()
    hvd.remove_process_set(some)


def test_signatures():
    names = (hvd.broadcast_parameters, hvd.broadcast_optimizer_state, hvd.broadcast_object, hvd.allgather_object)
    assert [
        [(each.name, each.default) for each in inspect.signature(function).parameters.values()] for function in names
    ] == [
        [("params", EMPTY), ("root_rank", EMPTY), EVERYBODY],
        [("optimizer", EMPTY), ("root_rank", EMPTY), ("model", None), EVERYBODY],
        [("obj", EMPTY), ("root_rank", 0), ("name", None), EVERYBODY],
        [("obj", EMPTY), ("name", None), EVERYBODY],
    ]


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("check", [check_every_optimizer_of_torch, check_tensors_of_any_kind])
def test_between_hosts(two_hosts, check):
    two_hosts.run(check)
