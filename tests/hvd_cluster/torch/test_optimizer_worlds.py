"""Distributed optimizers whose ranks change: from several to one, back, with newcomers, and in the middle of a step."""

import copy
import os
import signal
from contextlib import suppress

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.hvd_cluster.torch.training import build, flat, loss_of
from tests.hvd_cluster.torch.worlds import go_to

STEPS = 3
ROWS = 12
# For each process its rank and the size of the world, in each of the rounds; None: it is not there.
JOURNEYS = [
    [(0, 3), (0, 2), (0, 1), (0, 3)],
    [(1, 3), (1, 2), None, (2, 3)],
    [(2, 3), None, None, None],
    [None, None, None, (1, 3)],
]


def process():
    return int(os.environ["HOROVOD_RANK"])


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 7, generator=generator).double(), torch.randint(0, 3, (ROWS,), generator=generator)


def share(rows):
    return rows[hvd.rank() :: hvd.size()]


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, steps, share=share):
    for step in steps:
        optimizer.zero_grad()
        images, labels = batch(step)
        loss_of(model, share(images), share(labels)).backward()
        optimizer.step()


def alone(steps):
    model = build()
    train(model, optimizer_of(model), range(steps), lambda rows: rows)
    return flat(model)


def travel(base, count, early, options):
    """``count`` models with optimizers of the same names train side by side; returns their parameters at the end."""
    if early:
        os.environ["HOROVOD_CYCLE_TIME"] = "1"
    trained = []
    for round, world in enumerate(JOURNEYS[process()]):
        if world is None:
            hvd.shutdown()
            continue
        go_to(base + round, *world)
        if not trained:
            models = [build() for _ in range(count)]
            trained = [(model, hvd.DistributedOptimizer(optimizer_of(model), **options)) for model in models]
        for model, optimizer in trained:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(round * STEPS, (round + 1) * STEPS):
            for model, optimizer in trained:
                train(model, optimizer, [step])
    hvd.shutdown()
    os.environ.pop("HOROVOD_CYCLE_TIME", None)
    return [flat(model) for model, _ in trained], alone(4 * STEPS)


@pytest.fixture(scope="module")
def pool(pools):
    """Four processes that no other module uses: their engines come and go."""
    return pools(4, ["here"] * 4)


@pytest.mark.parametrize(
    ("base", "count", "early", "options"),
    [(10, 1, True, {}), (20, 2, True, {}), (30, 2, False, {"groups": 2})],
    ids=["early", "two early", "two in groups"],
)
def test_training_is_the_same_whatever_the_ranks_are(pool, base, count, early, options):
    """``early``: gradients travel in backward."""
    outcomes = pool.run(travel, base, count, early, options)
    parameters, expected = outcomes[0]
    assert len(parameters) == count
    for each in parameters:
        torch.testing.assert_close(each, expected, rtol=1e-10, atol=1e-12)
    for other in (1, 3):
        assert all(map(torch.equal, parameters, outcomes[other][0]))


def compress(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.powersgd)


def train_compressed(model, optimizer):
    for step in range(3):
        torch.manual_seed(10 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(5, 40).double()).square().mean().backward()
        optimizer.step()


def compress_with_a_newcomer(base):
    """The parameters after a world of two and one of three, and those with new optimizers in the second one."""
    if process() == 3:
        return None
    torch.manual_seed(1)
    model = torch.nn.Linear(40, 30, bias=False).double()
    if process() < 2:
        go_to(base, process(), 2)
        optimizer = compress(model)
        train_compressed(model, optimizer)
    go_to(base + 1, process(), 3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    again = copy.deepcopy(model)
    if process() == 2:
        optimizer = compress(model)
    train_compressed(model, optimizer)
    train_compressed(again, compress(again))
    hvd.shutdown()
    return flat(model), flat(again)


def test_compressors_with_a_state_start_again(pool):
    """PowerSGD continues from a matrix and an error that a newcomer does not have."""
    *outcomes, _ = pool.run(compress_with_a_newcomer, 40)
    first = outcomes[0][0]
    assert all(torch.equal(first, each) for pair in outcomes for each in pair)


def cut_off(victim):
    """The victim dies before its step; the others lose their handles, and go on: with two ranks, then with one."""
    os.environ["HOROVOD_CYCLE_TIME"] = "1"
    hvd.init()
    rank = hvd.rank()
    model = build()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), model.named_parameters())
    train(model, optimizer, range(2))
    if rank == victim:
        hvd.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    with suppress(hvd.HorovodInternalError):  # this rank may hear of the death before it has left the barrier
        hvd.barrier()
    with pytest.raises(hvd.HorovodInternalError):
        fail_beside_gradients(model)
    go_to(1, rank - (rank > victim), 2)
    train(model, optimizer, range(2, 4))
    if hvd.rank() == 1:
        hvd.shutdown()
        return None
    go_to(2, 0, 1)
    train(model, optimizer, range(4, 6))
    hvd.shutdown()
    return flat(model), alone(6)


def fail_beside_gradients(model):
    """Gradients are in flight, and the rank hears of the loss in another collective, or in backward."""
    loss_of(model, *batch(2)).backward()
    while True:
        hvd.allreduce(torch.ones(1), name="metric")


def test_a_survivor_discards_the_gradients_of_a_step_that_was_cut_off(fresh_pool):
    outcomes = fresh_pool(3).outcomes(cut_off, 1)
    parameters, expected = outcomes[0].unwrap()
    torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)
