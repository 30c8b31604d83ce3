"""How the members of several hosts agree: on each host first, then the hosts by their leaders.

The *leader* of a host is its first member. A round has up to three steps::

    inside      the members of each host vote
    across      the leaders vote, each for its host; a leader whose members differ declines
    inside      the members of each host learn the result: their leader votes for it, or declines

So a vote crosses the network once for each other host, not once for each other rank. Members that differ in the first
step know that without the others, and skip the third.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collectives.api import override
from collectives.backends.base import Call, OnMissing, Vote


class HostsVote(Vote):
    """The vote of a member of the host with number ``host``; ``hosts`` has the positions of the members of each.

    ``inside`` is the vote of this host, and ``across`` that of the leaders; None on a member that is none. ``run``
    calls the operation when all have agreed.

    A member knows which others of its host are missing, and a leader which hosts are. The leader of the first host
    names all of their members, because rank 0 finds out which of them wait themselves.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        host: int,
        inside: Vote,
        across: Vote | None,
        run: Callable[[Call], None],
    ) -> None:
        self._hosts = hosts
        self._host = host
        self._inside = inside
        self._across = across
        self._run = run

    @override
    def attempt(self, value: int, call: Call, waiting: OnMissing, agreed: Call) -> bool:
        if not self._agree(value, waiting):
            return False
        agreed()
        self._run(call)
        return True

    @override
    def decline(self) -> None:
        self._inside.decline()
        if self._across is not None:
            self._across.decline()

    @override
    def hurry(self) -> None:
        self._inside.hurry()
        if self._across is not None:
            self._across.hurry()

    def _agree(self, value: int, waiting: OnMissing) -> bool:
        if not _ask(self._inside, value, self._naming_members(waiting)):
            if self._across is not None:
                self._across.decline()
            return False
        if self._across is None:
            return _ask(self._inside, value, lambda _: waiting([]))
        if not _ask(self._across, value, self._naming_hosts(waiting)):
            self._inside.decline()
            return False
        return _ask(self._inside, value, self._naming_members(waiting))

    def _naming_members(self, waiting: OnMissing) -> OnMissing:
        members = self._hosts[self._host]
        return lambda absent: waiting([members[place] for place in absent])

    def _naming_hosts(self, waiting: OnMissing) -> OnMissing:
        if self._host:
            return lambda _: waiting([])
        return lambda absent: waiting([member for host in absent for member in self._hosts[host]])


def _ask(vote: Vote, value: int, waiting: OnMissing) -> bool:
    return vote.attempt(value, _nothing, waiting, _nothing)


def _nothing() -> None:
    return
