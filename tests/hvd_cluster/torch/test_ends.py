"""Ranks that die, and engines that come and go."""

import os
import signal
import threading
from contextlib import suppress

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics
from tests.collectives.engine.job import until

PLACES = {"shm": ["one"] * 3, "tcp": ["one", "two", "three"]}


def initialize():
    hvd.init()


def die_in_the_middle(victim):
    """Allreduces of 4 MB until the victim kills itself between two of them, while the others are inside one."""
    tensor = torch.ones(1 << 20)
    for step in range(50):
        if hvd.rank() == victim and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce_(tensor, op=hvd.Average, name="doomed")


def errors_after_a_death(victim):
    with pytest.raises(hvd.HorovodInternalError) as caught:
        die_in_the_middle(victim)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1), name="after")
    hvd.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("backend", PLACES)
def test_a_killed_rank_raises_on_the_survivors(fresh_pool, backend, victim):
    pool = fresh_pool(3, PLACES[backend])
    pool.run(initialize)
    outcomes = pool.outcomes(errors_after_a_death, victim)
    survivors = [outcome.unwrap() for rank, outcome in enumerate(outcomes) if rank != victim]
    assert outcomes[victim] is None
    assert all(f"rank {victim}" in text for text in survivors), survivors


def wait_for_a_name_that_never_comes(victim):
    if hvd.rank() == victim:
        hvd.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    handle = hvd.allreduce_async(torch.ones(3), name="lonely")
    with suppress(hvd.HorovodInternalError):  # this rank may hear of the death before it has left the barrier
        hvd.barrier()
    with pytest.raises(hvd.HorovodInternalError, match=f"rank {victim}"):
        hvd.synchronize(handle)
    hvd.shutdown()


def test_a_killed_rank_raises_in_negotiation(fresh_pool):
    pool = fresh_pool(3)
    pool.run(initialize)
    outcomes = pool.outcomes(wait_for_a_name_that_never_comes, 1)
    assert [outcome is None for outcome in outcomes] == [False, True, False]
    outcomes[0].unwrap()
    outcomes[2].unwrap()


def die_with_a_child(victim, told):
    """The child, like one of a DataLoader, outlives the victim and has inherited its connections.

    The other rank touches ``told`` when it knows the child.
    """
    lost = hvd.rank() == victim
    child = os.fork() if lost else 0
    if lost and not child:
        assert not hvd.is_initialized()
        signal.alarm(300)
        signal.pause()
    children = hvd.allgather_object(child)
    if lost:
        until(told.exists)
        os.kill(os.getpid(), signal.SIGKILL)
    told.touch()
    with pytest.raises(hvd.HorovodInternalError, match=f"rank {victim}"):
        hvd.allreduce(torch.ones(1), name="doomed")
    hvd.shutdown()
    return children[victim]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_forked_child_does_not_hide_a_death(fresh_pool, victim, tmp_path):
    pool = fresh_pool(2)
    pool.run(initialize)
    [outcome] = pool.outcomes(die_with_a_child, victim, tmp_path / "told", ranks=[1 - victim])
    os.kill(outcome.unwrap(), signal.SIGKILL)


def shut_down_when_inside(*_):
    """On a signal that comes again and again, until it finds this thread inside a call that drives."""
    if hvd.is_initialized() and basics.engine()._progress.is_driven_by(threading.get_ident()):
        signal.setitimer(signal.ITIMER_REAL, 0)
        hvd.shutdown()


def shut_down_in_a_signal_handler():
    if hvd.rank() == 1:
        signal.signal(signal.SIGALRM, shut_down_when_inside)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.05)
        with pytest.raises(hvd.HorovodInternalError, match="in a signal handler"):
            hvd.allreduce(torch.ones(1), name="lonely")
        assert not hvd.is_initialized()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="shut down by rank 1"):
            hvd.allreduce(torch.ones(1), name="also lonely")
        hvd.shutdown()


def test_shutdown_in_a_signal_handler(fresh_pool):
    pool = fresh_pool(2)
    pool.run(initialize)
    pool.run(shut_down_in_a_signal_handler)


def submit_more_than_a_socket_takes():
    """The message that says what to run is longer than the socket's buffer; it must get out before rank 0 runs."""
    names = [f"{'a.rather.long.name.' * 10}{number}" for number in range(3000)]
    handles = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name=name) for name in names]
    assert sum(hvd.synchronize(handle).item() for handle in handles) == len(names) * hvd.size()


@pytest.mark.parametrize("hosts", [["one", "one"], ["one", "two"]])
def test_many_names_at_once(fresh_pool, hosts):
    pool = fresh_pool(2, hosts, {"HOROVOD_CYCLE_TIME": "10000"})
    pool.run(initialize)
    pool.run(submit_more_than_a_socket_takes)


def inventory():
    """What this process has; a thread of Gloo may end a moment after what it did."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:hvd" in line for line in maps)
    files = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}  # which any process makes
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mapped, files


def start_and_stop_often(times):
    hvd.init()
    hvd.shutdown()
    before = inventory()
    for _ in range(times):
        hvd.init()
        assert hvd.allreduce(torch.ones(5), op=hvd.Sum).tolist() == [float(hvd.size())] * 5
        hvd.shutdown()
    until(lambda: all(now <= then for now, then in zip(inventory(), before, strict=True)))


@pytest.mark.parametrize(("times", "hosts"), [(100, ["one", "one"]), (20, ["one", "two"])])
def test_init_and_shutdown_leave_nothing(fresh_pool, times, hosts):
    fresh_pool(2, hosts).run(start_and_stop_often, times)


def leave_while_others_wait():
    if hvd.rank() == 1:
        hvd.barrier()
        hvd.shutdown()
        return
    handle = hvd.allreduce_async(torch.ones(3), name="never")
    hvd.barrier()
    with pytest.raises(hvd.HorovodInternalError, match=r"by rank 1 .* has not called 'allreduce\.never'; let"):
        hvd.synchronize(handle)
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()


def test_shutdown_of_one_rank_ends_all(fresh_pool):
    pool = fresh_pool(3)
    pool.run(initialize)
    pool.run(leave_while_others_wait)
    pool.run(initialize)
    assert pool.run(lambda: hvd.allreduce(torch.ones(1), op=hvd.Sum).item()) == [3.0] * 3


def test_a_world_of_one_needs_no_launcher():
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size()) == (0, 1)
        assert hvd.allreduce(torch.ones(2), op=hvd.Average).tolist() == [1.0, 1.0]
    finally:
        hvd.shutdown()


def lose_a_rank_that_connects():
    """Rank 1 ends when a new process set is about to be connected. Returns the error of another rank."""
    from collectives.engine import start

    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        start._Formation.connect = lambda *_: os._exit(1)

    def add():
        hvd.add_process_set([0, 1])
        hvd.barrier()

    with pytest.raises(hvd.HorovodInternalError) as caught:
        add()
    hvd.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("operations", ["shm", "tcp", "gloo"])
def test_a_rank_lost_while_a_process_set_connects_is_named_at_once(fresh_pool, operations):
    environment = {"HOROVOD_CPU_OPERATIONS": operations, "HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}
    outcomes = fresh_pool(3, environment=environment).outcomes(lose_a_rank_that_connects, ranks=[0, 2])
    for outcome in outcomes:
        assert "rank 1 on host 'here' is gone" in outcome.unwrap()
