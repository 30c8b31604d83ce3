"""How the ranks of a host with a relay connect: rank 0 lets no rank start unless all have, and all hear one reason."""

import threading

import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError, ShutDownError
from collectives.handshake import admission, dial
from collectives.handshake import connect as member
from collectives.net.relay import relays
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, outcome
from tests.collectives.handshake.handshakes import connect, ranks

HOSTS = ("a", "b", "b", "b")
LEADER, FOLLOWER = 1, 3


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """No rank that runs is too slow to answer."""
    monkeypatch.setattr(dial, "REASON_SECONDS", PATIENCE)
    monkeypatch.setattr(admission, "QUESTION_SECONDS", 1.0)


def errors(monkeypatch, name, stop, timeouts=None):
    """The error of each rank, where ``stop(rank)`` is called as ``member.name`` begins; None if it has connected."""
    step = getattr(member, name)

    def stopping(end, *rest):
        stop(end.hello.rank)
        return step(end, *rest)

    def body(rank):
        result = outcome(lambda: connect(hellos[rank], store, timeout=(timeouts or {}).get(rank, PATIENCE)))
        if isinstance(result, Exception):
            return result
        result.channel.close()
        return None

    monkeypatch.setattr(member, name, stopping)
    store, hellos = MemoryStore(), ranks(4, HOSTS)
    return in_threads(4, body, 2 * PATIENCE)


def test_a_follower_that_gives_up_before_it_meets_its_leader_ends_the_start_of_all(monkeypatch):
    def stop(rank):
        if rank == FOLLOWER:
            raise ShutDownError("enough")

    found = errors(monkeypatch, "_call_leader", stop)
    assert [type(error) for error in found] == [ShutDownError] * 4
    assert {str(error) for error in found} == {"enough"}


@pytest.mark.parametrize("victim", [LEADER, FOLLOWER])
def test_a_rank_that_fails_within_its_host_ends_the_start_of_all(victim, monkeypatch):
    def stop(rank):
        if rank == victim:
            raise PeerLostError("no route", [2])

    found = errors(monkeypatch, "_connect_host", stop)
    assert {str(error) for error in found} == {"no route"}
    assert {error.ranks for error in found} == {(2,)}


@pytest.mark.parametrize(
    ("stopped", "first"), [(LEADER, 0), (LEADER, 2), (2, 0), (2, LEADER), (2, FOLLOWER), (FOLLOWER, 0), (FOLLOWER, 2)]
)
def test_a_rank_that_stops_before_it_connects_within_its_host_is_named_by_all(stopped, first, monkeypatch):
    """Rank 0, the leader or a follower gives up ``first``. The stopped rank goes on much later."""

    def stop(rank):
        if rank == stopped:
            assert others_ended.wait(PATIENCE)

    def body_ended(self, *rest):
        leave(self, *rest)
        if self._end.hello.rank == 0:
            others_ended.set()

    others_ended, leave = threading.Event(), admission.Admission.__exit__
    monkeypatch.setattr(admission.Admission, "__exit__", body_ended)
    found = errors(monkeypatch, "_connect_host", stop, {first: 1.0})
    for rank, error in enumerate(found):
        if rank != stopped:
            assert type(error) is CollectiveTimeoutError, (rank, error)
            assert error.ranks == (stopped,), (rank, error)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", {}),
        ("aaaa", {}),
        ("abc", {}),
        ("aabb", {2: (2, 3)}),
        ("abab", {1: (1, 3)}),
        ("abbcddd", {1: (1, 2), 4: (4, 5, 6)}),
    ],
)
def test_hosts_of_several_ranks_get_a_relay_but_for_that_of_rank_0(hosts, expected):
    assert relays(hosts) == expected
