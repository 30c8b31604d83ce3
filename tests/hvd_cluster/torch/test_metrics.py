"""The metrics of ranks that go from world to world."""

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.hvd_cluster.torch.worlds import go_to


def step(name):
    """The metrics of this rank after one more allreduce, and a barrier among all."""
    hvd.allreduce(torch.ones(4), name=name)
    hvd.barrier()
    return hvd.metrics()


def next_world():
    go_to(1, 1 - hvd.rank(), 2)
    return step("second")


def test_metrics_go_on_in_the_next_world(fresh_pool):
    pool = fresh_pool(2)
    pool.run(hvd.init)
    before = pool.run(step, "first")
    after = pool.run(next_world)
    assert [(each.rank, each.size, each.round, each.rounds) for each in before] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert [(each.rank, each.size, each.round, each.rounds) for each in after] == [(1, 2, 1, 2), (0, 2, 1, 2)]
    for each in after:
        assert each.process_sets[0].operations == {"allreduce": 2, "barrier": 2}
        assert each.process_sets[0].bytes == 2 * 16
    assert all(old.messages_sent < new.messages_sent for old, new in zip(before, after, strict=True))


def steps():
    before = hvd.metrics().steps
    for op in (hvd.Average, hvd.Adasum):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], op=op)
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
    return hvd.metrics().steps - before


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_steps_of_optimizers_are_counted(ranks):
    assert ranks.run(steps) == [4, 4]
