"""Rounds of votes in which each member sends its own to all others: one step, for members that have cores of their own.

A vote is a *frame*: the number that the member votes for, the length of the data behind it, the core that the member
runs on, and that data: the short messages of the operation. So an operation of one step needs no further step where all
members vote for it, and a member that votes for something else knows how much to drop.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from collectives.api import DType
from collectives.backends.group import Group
from collectives.backends.placement import Placement, current_core
from collectives.backends.tcp.ballot import (
    RIDING,
    Ballot,
    Disagreement,
    Question,
    Views,
    check_length,
    dropped,
    length_of,
    scatter,
)
from collectives.backends.tcp.link import Link, Script, memory
from collectives.backends.tcp.pump import Pump
from collectives.backends.workspace import Workspace

__all__ = ["Mesh"]

HEAD = struct.Struct("<IIi")


class Mesh(Ballot):
    """See :class:`Ballot`, for a member of ``group``."""

    def __init__(self, group: Group, links: Mapping[int, Link], pump: Pump) -> None:
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
        self._landing = Workspace()

    def decline(self) -> None:
        """See :class:`Ballot`."""
        self._cast(0, {}, {})
        self.flush()

    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        landing = {position: views[0] for position, views in incoming.items()} if spare else self._rooms(incoming)
        self._cast(question.value, outgoing, landing)
        self._await_votes(question)
        self._pump.run()
        if not spare:
            for position, views in incoming.items():
                scatter(landing[position], views)

    def _await_votes(self, question: Question) -> None:
        self._await(self._is_decided, lambda: question.waiting(sorted(self._absent)), self._look_around)
        if self._differs:
            self._break_off()
            raise Disagreement
        question.agreed()

    def _look_around(self) -> None:
        """Leave this core, if a member that has not voted runs on it."""
        here = current_core()
        if any(self._cores.get(position) == here for position in self._neighbours if position in self._absent):
            self._placement.improve(here, [*self._cores.values()], self._round)

    def _cast(self, value: int, outgoing: Mapping[int, Views], landing: Mapping[int, memoryview]) -> None:
        """Begin the next round."""
        self._round += 1
        self._value, self._differs = value, False
        self._absent = set(self._links)
        core = current_core()
        for position, link in self._links.items():
            views = outgoing.get(position, ())
            link.send((memoryview(HEAD.pack(value, length_of(views), core)), *views))
            link.receive(self._frame(position, self._round, landing.get(position)))

    def _frame(self, position: int, round: int, target: memoryview | None) -> Script:
        """Receive the vote of a member in ``round``, and its data into ``target`` if that is wanted then."""
        head = bytearray(HEAD.size)
        yield memoryview(head)
        value, length, core = HEAD.unpack(head)
        if position in self._neighbours:
            self._cores[position] = core
        if round == self._round and value == self._value != 0:
            self._absent.discard(position)
            yield from self._riding(position, length, target)
            return
        if round == self._round:
            self._differs = True
        yield from dropped(length)

    def _riding(self, position: int, length: int, target: memoryview | None) -> Script:
        check_length(self._group, position, length, 0 if target is None else len(target))
        if target is not None:
            yield target

    def _is_decided(self) -> bool:
        return self._differs or not self._absent

    def _break_off(self) -> None:
        """Leave the round: the frames that have not come are of no interest."""
        self._value = 0
        for position, link in self._links.items():
            link.give_up(is_filling=position not in self._absent)

    def _rooms(self, messages: Mapping[int, Views]) -> dict[int, memoryview]:
        """Memory for ``messages``, away from their destinations."""
        lengths = {position: length_of(views) for position, views in messages.items()}
        rooms = memory(self._landing.take(sum(lengths.values()), DType.UINT8))
        found, start = {}, 0
        for position, length in lengths.items():
            found[position] = rooms[start : start + length]
            start += length
        return found
