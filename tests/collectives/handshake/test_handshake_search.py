"""How a rank finds rank 0, which may be in another start or round."""

import socket
import threading

import msgpack
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    PeerLostError,
)
from collectives.handshake import Hello, search
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, outcome
from tests.collectives.handshake.handshakes import KEY, LOCALHOST, connect, connect_all


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_hello_of_another_world_is_refused_by_name(ahead):
    """Both ranks look at one place of the store, as if a round had no place of its own."""

    class OnePlace(MemoryStore):
        def get(self, key, timeout):
            return super().get(key.replace("round-4", "round-3"), timeout)

        def set(self, key, value, timeout=None):
            super().set(key.replace("round-4", "round-3"), value)

    def body(rank):
        hello = Hello(rank, 2, "node", job="train", round=3 + (rank == ahead))
        return outcome(lambda: connect(hello, store, timeout=PATIENCE if rank else 1.0))

    store = OnePlace()
    errors = in_threads(2, body, PATIENCE)
    text = f"rank 1 is in round {3 + ahead} of job 'train', rank 0 in round {4 - ahead} of job 'train'; only "
    assert text in str(errors[1])
    assert type(errors[1]) is PeerLostError
    if ahead:  # or else rank 0 goes on waiting for the rank 1 of its own round
        assert text in str(errors[0])
        assert (type(errors[0]), errors[0].ranks) == (PeerLostError, (1,))
    else:
        assert "ranks [1] of 2 did not connect" in str(errors[0])


def test_a_rank_ahead_of_rank_0_is_refused_by_name_and_waits_for_its_round(monkeypatch):
    """Rank 0 learns at once that its round is over; the launcher then gives it the next one."""
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(search, "CALL_SECONDS", PATIENCE)

    def body(rank):
        errors = [outcome(lambda: connect(Hello(0, 2, "node", round=3), store))] if rank == 0 else []
        connected = connect(Hello(rank, 2, "node", round=4), store)
        done.wait(PATIENCE)
        connected.channel.close()
        return errors

    store, done = MemoryStore(), threading.Barrier(2)
    (error,), _ = in_threads(2, body, PATIENCE)
    assert isinstance(error, PeerLostError)
    assert "rank 1 is in round 4 of job 'job', rank 0 in round 3 of job 'job'" in str(error)
    assert (type(error), error.ranks) == (PeerLostError, (1,))


def test_a_rank_ahead_of_rank_0_says_which_round_rank_0_is_in(monkeypatch):
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.05)
    store = MemoryStore()
    hellos = [Hello(rank, 2, "node", round=3 + rank) for rank in range(2)]
    _, error = in_threads(2, lambda rank: outcome(lambda: connect(hellos[rank], store, timeout=1.0)), PATIENCE)
    assert type(error) is CollectiveTimeoutError
    assert "rank 0 of round 4 of job 'job' did not come in time: it is still in round 3" in str(error)
    assert error.ranks == (0,)


def test_a_rank_0_that_is_ahead_says_which_rank_called_in_which_round(monkeypatch):
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.05)
    store = MemoryStore()
    hellos = [Hello(rank, 2, "node", round=6 - rank) for rank in range(2)]
    first, second = in_threads(2, lambda rank: outcome(lambda: connect(hellos[rank], store, timeout=1.0)), PATIENCE)
    assert type(first) is CollectiveTimeoutError
    assert "(rank 1 called in round 5 of job 'job'; rank 0 is in round 6 of job 'job')" in str(first)
    assert first.ranks == (1,)
    assert type(second) is PeerLostError
    assert "rank 1 is in round 5 of job 'job', rank 0 in round 6 of job 'job'" in str(second)


def test_without_rank_0_the_others_time_out():
    (error,) = connect_all([Hello(1, 2, "node")], timeout=0.05)
    assert isinstance(error, CollectiveTimeoutError)


def test_a_rank_0_that_went_away_is_lost():
    store = MemoryStore()
    with socket.socket() as gone:  # it keeps the port from others, and does not listen
        gone.bind((LOCALHOST, 0))
        entry = {"id": "1", "host": "other", "unix": "\0hvd-cluster-nobody", "tcp": gone.getsockname()}
        store.set(KEY, msgpack.packb(entry))
        (error,) = connect_all([Hello(1, 2, "node")], store, timeout=0.1)
    assert isinstance(error, PeerLostError)
    assert "rank 0 does not answer at" in str(error)
