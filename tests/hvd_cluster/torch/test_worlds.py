"""Processes that go from world to world: what stays, what ends, and what a failed change leaves."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import NotInitializedError, ShutDownError
from hvd_cluster.core import basics
from tests.collectives.engine.job import until
from tests.hvd_cluster.torch.worlds import go_to, start_in

CORES = sorted(os.sched_getaffinity(0))


def numbers():
    """The numbers of this rank, and an allreduced sum of all ranks."""
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    return place, hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="sum").item()


def seen(rank, size):
    return (rank, size, rank, size, 0, 1), size * (size + 1) / 2


def come_and_go(journey):
    """``journey`` has, for each round, the rank and the size of the world for this process; None: it is elsewhere."""
    found = []
    for round, world in enumerate(journey):
        if world is None:
            hvd.shutdown()
            continue
        (go_to if basics.is_initialized() else start_in)(round, *world)
        found.append(numbers())
    hvd.shutdown()
    return found


def test_newcomers_meet_survivors_under_new_numbers(fresh_pool):
    """Two start; a third comes, as rank 0; it stays while the first of the two leaves."""
    journeys = [
        [(0, 2), (1, 2), (1, 3), None],
        [(1, 2), (0, 2), (2, 3), (1, 2)],
        [None, None, (0, 3), (0, 2)],
    ]
    pool = fresh_pool(3)
    outcomes = pool.run(lambda: come_and_go(journeys[int(os.environ["HOROVOD_RANK"])]))
    assert outcomes == [[seen(*world) for world in journey if world] for journey in journeys]


def change_with_handles_and_sets():
    hvd.init()
    rank, pair = hvd.rank(), hvd.add_process_set([0, 1])
    done = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="done")
    while not hvd.poll(done):
        pass
    pending = hvd.allreduce_async(torch.ones(2), name="lonely") if rank == 0 else None
    hvd.barrier()  # after it, the change of another rank may end this world at any time
    go_to(1, (rank + 1) % 3, 3)
    assert hvd.synchronize(done).tolist() == [3.0, 3.0]
    if pending is not None:
        assert hvd.poll(pending)
        with pytest.raises(ShutDownError):
            hvd.synchronize(pending)
    assert pair.process_set_id is None
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(torch.ones(1), process_set=pair)
    assert hvd.add_process_set(pair) is pair
    assert (pair.process_set_id, pair.included()) == (1, rank != 1)
    if pair.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2.0
    hvd.barrier()
    hvd.shutdown()


def test_done_handles_stay_and_process_sets_end(fresh_pool):
    fresh_pool(3).run(change_with_handles_and_sets)


def fail_and_go_on():
    hvd.init()
    rank = hvd.rank()
    hvd.barrier()
    with (
        connecting_for(3),
        pytest.raises(hvd.HorovodInternalError, match=r"ranks \[2\] of 3 did not connect"),
    ):
        go_to(1, rank, 3)
    assert not hvd.is_initialized()
    with pytest.raises(NotInitializedError):
        hvd.size()
    go_to(2, rank, 2)
    assert numbers() == seen(rank, 2)
    hvd.shutdown()
    return rank


def test_after_a_change_that_failed_the_next_one_works(fresh_pool):
    """Rank 2 of the world in between never comes."""
    assert fresh_pool(2).run(fail_and_go_on) == [0, 1]


@contextmanager
def connecting_for(seconds):
    """In the block this rank waits only for a short time, so not in a world that all ranks reach."""
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(seconds)
    try:
        yield
    finally:
        del os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]


def fail_and_try_again(failed):
    """Rank 1 tries alone, in vain, and touches ``failed``."""
    rank = int(os.environ["HOROVOD_RANK"])
    if rank < 2:
        start_in(0, rank, 2)
        hvd.barrier()
    if rank == 1:
        with connecting_for(1), pytest.raises(hvd.HorovodInternalError):
            go_to(1, 1, 3)
        failed.touch()
    else:
        hvd.shutdown()
        until(failed.exists)
    if rank == 1:
        hvd.init()
    elif rank == 0:
        go_to(1, 0, 3)
    else:
        start_in(1, 2, 3)
    found = numbers()
    hvd.shutdown()
    return found


def test_init_after_a_change_that_failed_connects_in_the_world_of_the_change(fresh_pool, tmp_path):
    assert fresh_pool(3).run(fail_and_try_again, tmp_path / "failed") == [seen(rank, 3) for rank in range(3)]


def reduce_for_ever():
    hvd.barrier()  # a rank may hear of the death before it has left the barrier
    while True:
        hvd.allreduce(torch.ones(4), name="x")


def survive(victim):
    hvd.init()
    rank = hvd.rank()
    if rank == victim:
        hvd.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        reduce_for_ever()
    go_to(1, rank - (rank > victim), 2)
    found = numbers()
    hvd.shutdown()
    return caught.value.ranks, caught.value.hosts, found


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("operations", ["shm", "tcp", "gloo"])
def test_survivors_of_a_loss_go_on(fresh_pool, operations, victim):
    pool = fresh_pool(3, environment={"HOROVOD_CPU_OPERATIONS": operations})
    outcomes = pool.outcomes(survive, victim)
    survivors = [outcome.unwrap() for outcome in outcomes if outcome is not None]
    assert survivors == [((victim,), ("here",), seen(rank, 2)) for rank in range(2)]


def cores_of_the_communication_thread():
    import threading

    def core():
        (thread,) = (each for each in threading.enumerate() if each.name.startswith("hvd-engine"))
        hvd.barrier()
        until(lambda: len(os.sched_getaffinity(thread.native_id)) == 1)  # the thread binds itself when it begins
        return os.sched_getaffinity(thread.native_id)

    hvd.init()
    rank, before = hvd.rank(), core()
    go_to(1, 1 - rank, 2)
    after = core()
    hvd.shutdown()
    return before, after


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_core_of_the_communication_thread_is_that_of_the_new_local_rank(fresh_pool):
    first, second = CORES[:2]
    pool = fresh_pool(2, environment={"HOROVOD_THREAD_AFFINITY": f"{first},{second}"})
    assert pool.run(cores_of_the_communication_thread) == [({first}, {second}), ({second}, {first})]
