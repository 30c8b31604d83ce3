"""Two hosts that are one, in a world that counts as large: ranks 3 and 4 reach rank 0 through rank 2 only."""

import os
import signal

import pytest

import hvd_cluster.torch as hvd
from tests.collectives.engine.job import until
from tests.hvd_cluster.torch import test_relays as relays
from tests.hvd_cluster.torch import test_stopped_ranks as stopped

HOSTS = ["a", "a", "b", "b", "b"]
LEADER, FOLLOWER = 2, 3


@pytest.fixture
def large_pool(fresh_pool):
    """As ``fresh_pool``; its ranks believe that a world of two is large."""

    def make(environment=None):
        pool = fresh_pool(len(HOSTS), HOSTS, environment)
        pool.run(believe)
        return pool

    return make


def believe():
    from collectives.handshake import hello
    from collectives.store import client

    hello.MOST_DIRECT = client.MOST_READERS = 1


def start():
    """The class of the channel."""
    from hvd_cluster.core import basics

    hvd.init()
    return type(basics.engine()._loop.channel).__name__


def test_ranks_start_work_together_end_and_start_again(large_pool):
    pool = large_pool()
    for _ in range(3):
        assert pool.run(start) == ["Center", "SocketChannel", "Leader", "Follower", "Follower"]
        for found in pool.run(relays.sums, 2):
            assert found[1] == [5 * i + 10 for i in range(20)] + [10]
        pool.run(hvd.shutdown)


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (0, "backend"),
        (0, "negotiation"),
        (1, "negotiation"),
        (LEADER, "backend"),
        (LEADER, "negotiation"),
        (FOLLOWER, "backend"),
        (FOLLOWER, "negotiation"),
    ],
)
def test_every_rank_names_the_rank_that_died(large_pool, victim, place):
    pool = large_pool()
    pool.run(start)
    outcomes = pool.outcomes(relays.die, victim, place)
    texts = [outcome.unwrap() for rank, outcome in enumerate(outcomes) if rank != victim]
    host = HOSTS[victim]
    assert all(text.startswith(f"rank {victim} on host '{host}' is gone") for text in texts), texts


@pytest.mark.parametrize("victim", [0, LEADER, FOLLOWER])
def test_every_rank_names_the_rank_that_was_stopped(large_pool, victim, tmp_path):
    """Also the followers of a stopped leader, which hear of nobody else."""
    pool, marker = large_pool(stopped.STALLS), tmp_path / "running"

    def stop_when_running():
        until(marker.exists, stopped.START_SECONDS)
        os.kill(pool.processes[victim].pid, signal.SIGSTOP)

    survivors = [rank for rank in range(len(HOSTS)) if rank != victim]
    pool.run(start)
    task = stopped.reduce_until_error, stopped.SMALL, marker
    try:
        found = [each.unwrap() for each in pool.outcomes(*task, ranks=survivors, then=stop_when_running)]
    finally:
        pool.processes[victim].kill()
    for text, ranks, _ in found:
        assert ranks == (victim,), text
        assert f"rank {victim} on host" in text
