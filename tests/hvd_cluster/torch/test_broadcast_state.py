"""The parameters and the optimizer state of one rank, on all ranks."""

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError
from tests.checks import each_check
from tests.hvd_cluster.torch.training import assert_identical_everywhere, build, data, loss_of


def check_state_keeps_its_type():
    """float32 state of bfloat16 parameters."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    state = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 0.1), "exp_avg_sq": torch.full((3,), 0.001)}
    if hvd.rank() == 0:
        optimizer.state[parameter] = state
    hvd.broadcast_optimizer_state(optimizer, 0)
    for key, value in state.items():
        assert optimizer.state[parameter][key].dtype == value.dtype
        assert torch.equal(optimizer.state[parameter][key], value)


def check_broadcast_parameters():
    torch.manual_seed(hvd.rank())
    for give in (lambda m: m.state_dict(), lambda m: m.named_parameters(), lambda m: list(m.parameters())):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        hvd.broadcast_parameters(give(model), root_rank=hvd.size() - 1)
        assert_identical_everywhere(model)
    for wrong in (3, torch.ones(2), ["name"]):
        with pytest.raises(InvalidRequestError):
            hvd.broadcast_parameters(wrong, 0)


def check_only_an_optimizer_has_a_state():
    for wrong in (build(), None):
        with pytest.raises(InvalidRequestError, match=r"optimizer is a \w+; give a torch\.optim\.Optimizer"):
            hvd.broadcast_optimizer_state(wrong, 0)


def check_broadcast_optimizer_state():
    """One rank restored, the others fresh, and the other way round."""
    for root in (0, hvd.size() - 1):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if hvd.rank() == root else 0.1)
        if hvd.rank() == root:
            loss_of(model, *data(0)).backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root)
        assert optimizer.param_groups[0]["lr"] == 0.5
        moments = torch.cat([state["exp_avg"].reshape(-1) for state in optimizer.state.values()])
        everybody = hvd.allgather(moments.reshape(1, -1))
        assert all(torch.equal(everybody[root], row) for row in everybody)
        assert [state["step"].item() for state in optimizer.state.values()] == [1.0] * len(list(model.parameters()))
    stateless = torch.optim.SGD(build().parameters(), lr=float(hvd.rank()))
    hvd.broadcast_optimizer_state(stateless, 0)
    assert stateless.param_groups[0]["lr"] == 0.0


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
