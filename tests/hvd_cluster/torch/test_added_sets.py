"""Process sets that real ranks on two hosts add while they run: in a host, between hosts, and over both."""

import os
import signal

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics
from tests.namespaces import HOSTS

SETS = {(0, 1): "shm", (0, 2): "tcp", (1, 2, 3): "hierarchical", (3,): "single"}


@pytest.fixture
def pool(network, fresh_pool):
    """Initialized ranks 0 and 1 on the first host, 2 and 3 on the second."""
    pool = fresh_pool(4, [host for host in HOSTS for _ in range(2)], network=network)
    pool.run(hvd.init)
    return pool


def summed(added):
    """The backends of an allreduce on the set ``added``, and whether its sum is right."""
    backends, ranks = set(), added.ranks
    end = basics.engine().events.subscribe(lambda event: backends.add(getattr(event, "backend", None)))
    total = hvd.allreduce(torch.full((8,), hvd.rank() + 1.0), op=hvd.Sum, process_set=added)
    end()
    return backends - {None}, total.tolist() == [sum(ranks) + len(ranks)] * 8


def add(sets):
    """The result of :func:`summed` for each of ``sets`` that has this rank."""
    found = {}
    for ranks in sets:
        added = hvd.add_process_set(list(ranks))
        if added.included():
            found[ranks] = summed(added)
        hvd.barrier()
        hvd.remove_process_set(added)
    return found


def lose(victim):
    """``victim`` is killed when it connects to the other members of a new set; the ranks that the others name."""
    from collectives.engine import start

    if hvd.rank() == victim:
        start._Formation.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def go_on():
        hvd.add_process_set([1, 2, 3])
        hvd.barrier()

    with pytest.raises(hvd.HorovodInternalError) as caught:
        go_on()
    hvd.shutdown()
    return type(caught.value).__name__, getattr(caught.value, "ranks", ())


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_sets_are_added_on_two_hosts_and_a_rank_that_dies_meanwhile_is_named(pool, victim):
    for rank, found in enumerate(pool.run(add, list(SETS))):
        assert found == {ranks: ({name}, True) for ranks, name in SETS.items() if rank in ranks}
    outcomes = pool.outcomes(lose, victim)
    assert outcomes.pop(victim) is None
    assert [outcome.unwrap() for outcome in outcomes] == [("PeerLostError", (victim,))] * 3
