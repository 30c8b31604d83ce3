"""Rounds of votes in which each member sends its own to all others: one step, for members that have cores of their own.

A vote is a *frame*: the number that the member votes for, the length of the data behind it, the core that the member
runs on, and that data: the short messages of the operation. So an operation of one step needs no further step where all
members vote for it, and a member that votes for something else knows how much to drop.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from collectives.api import override
from collectives.backends.base import Group
from collectives.backends.placement import Placement, current_core
from collectives.backends.tcp.ballot import (
    RIDING,
    Ballot,
    BallotDisagreement,
    Question,
    Views,
    check_length,
    dropped,
    length_of,
    scatter,
)
from collectives.backends.tcp.link import Script, TcpLink
from collectives.backends.tcp.pump import Pump

HEAD = struct.Struct("<IIi")


class Mesh(Ballot):
    """A :class:`Ballot`, for a member of ``group``."""

    def __init__(self, group: Group, links: Mapping[int, TcpLink], pump: Pump) -> None:
        super().__init__(links, pump, RIDING)
        self._group = group
        here = group.hosts[group.position]
        self._neighbours = [position for position in links if group.hosts[position] == here]
        self._cores: dict[int, int] = {}
        self._placement = Placement()
        self._round = 0
        self._value = 0
        self._absent: set[int] = set()
        self._differs = False
        self._incoming: Mapping[int, Views] = {}
        self._is_spare = False
        self._all_agree = False
        self._landed: list[tuple[memoryview, Views]] = []

    @override
    def decline(self) -> None:
        self._cast(0, {})
        self.flush()

    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        self._incoming, self._is_spare = incoming, spare
        try:
            self._cast(question.value, outgoing)
            self._await_votes(question)
            self._pump.run()
            for room, targets in self._landed:
                scatter(room, targets)
        finally:
            self._forget()

    def _await_votes(self, question: Question) -> None:
        self._await(self._is_decided, lambda: question.waiting(sorted(self._absent)), self._look_around)
        if self._differs:
            self._break_off()
            raise BallotDisagreement
        question.agreed()
        self._all_agree = True

    def _forget(self) -> None:
        """Let go of the memory of the caller, and drop what still comes in this round."""
        self._value, self._all_agree = 0, False
        self._incoming, self._landed = {}, []

    def _look_around(self) -> None:
        """Leave this core, if a member that has not voted runs on it."""
        here = current_core()
        if any(self._cores.get(position) == here for position in self._neighbours if position in self._absent):
            self._placement.improve(here, [*self._cores.values()], self._round)

    def _cast(self, value: int, outgoing: Mapping[int, Views]) -> None:
        """Begin the next round."""
        self._round += 1
        self._value, self._differs = value, False
        self._absent = set(self._links)
        core = current_core()
        for position, link in self._links.items():
            views = outgoing.get(position, ())
            link.send((memoryview(HEAD.pack(value, length_of(views), core)), *views))
            link.receive(self._frame(position, self._round))

    def _frame(self, position: int, round: int) -> Script:
        """Receive the vote of a member in ``round``, and its data if that is wanted then."""
        head = bytearray(HEAD.size)
        yield memoryview(head)
        value, length, core = HEAD.unpack(head)
        if position in self._neighbours:
            self._cores[position] = core
        if value == self._value and self._is_open(round):
            yield from self._riding(position, round, length)
            return
        if round == self._round:
            self._differs = True
        yield from dropped(length)

    def _riding(self, position: int, round: int, length: int) -> Script:
        """Receive the data behind a vote that fits. Its destination must not be written before all have agreed."""
        targets = self._incoming.get(position, ())
        check_length(self._group, position, length, length_of(targets))
        self._absent.discard(position)
        if length and not (self._is_spare and len(targets) == 1):
            if self._absent:
                targets = self._aside(length, targets)
            while not (self._absent or self._all_agree) and self._is_open(round):
                yield None
        yield from targets if self._is_open(round) else dropped(length)

    def _aside(self, length: int, targets: Views) -> Views:
        """Other memory for the data of ``targets``."""
        room = memoryview(bytearray(length))
        self._landed.append((room, targets))
        return (room,)

    def _is_open(self, round: int) -> bool:
        """Whether this member still takes part in ``round``, and has a question there."""
        return round == self._round and self._value != 0

    def _is_decided(self) -> bool:
        return self._differs or not self._absent

    def _break_off(self) -> None:
        """Leave the round: the frames that have not come are of no interest."""
        self._value = 0
        for position, link in self._links.items():
            link.give_up(is_filling=position not in self._absent)
