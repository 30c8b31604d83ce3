"""How the ranks of a host with a relay connect."""

import pytest

from collectives.api import (
    CollectiveTimeoutError,
    PeerLostError,
)
from collectives.control.handshake import Hello, member
from collectives.control.tree import relays
from collectives.rendezvous.store import MemoryStore
from tests.backends.members import in_threads
from tests.collectives.handshakes import connect
from tests.collectives.job import PATIENCE


def test_a_follower_that_does_not_come_is_named(monkeypatch):
    """Rank 3 meets rank 0, then dies before it meets its leader."""
    join = member._join

    def vanish(end, *rest):
        if end.hello.rank == 3:
            raise KeyboardInterrupt
        return join(end, *rest)

    def body(rank):
        try:
            connected = connect(Hello(rank, 4, "b" if rank else "a"), store, timeout=0.5)
        except (CollectiveTimeoutError, PeerLostError, KeyboardInterrupt) as error:
            return error
        connected.channel.close()
        return None

    monkeypatch.setattr(member, "_join", vanish)
    store = MemoryStore()
    center, leader, follower, _ = in_threads(4, body, PATIENCE)
    assert center is None
    assert isinstance(leader, CollectiveTimeoutError | PeerLostError)
    assert isinstance(follower, CollectiveTimeoutError | PeerLostError)


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
