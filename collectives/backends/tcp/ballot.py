"""Rounds of votes between the members of a group: each sends all others the number of the schedule that it attempts.

A vote is a *frame*: the number that the member votes for, the length of the data behind it, the core that the member
runs on, and that data: the short messages of the operation. So an operation of one step needs no further step where all
members vote for it, and a member that votes for something else knows how much to drop. A member may leave a round
early, and vote in the next one before it has got all frames of the last one. They arrive in order, before anything else
on their link.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import numpy as np

from collectives.api import DType, EngineError, HorovodInternalError
from collectives.backends.group import Group
from collectives.backends.placement import Placement, current_core
from collectives.backends.tcp.link import Link, Script, memory
from collectives.backends.tcp.pump import Pump
from collectives.backends.workspace import Workspace

__all__ = ["RIDING", "Ballot", "Disagreement", "Views"]

RIDING = 1 << 16
"""Bytes of a message that travels with a vote; both ends know its length. Longer ones follow when all have voted."""

Views = Sequence[memoryview]

HEAD = struct.Struct("<IIi")
DROPPED = 1 << 16


class Disagreement(Exception):
    """Not all members vote for the same."""


class _Question(NamedTuple):
    """A vote that travels with the next exchange, see :meth:`Ballot.ask`."""

    value: int
    waiting: Callable[[list[int]], None]
    agreed: Callable[[], None]


class Ballot:
    """The votes of a member of ``group`` over its ``links``, by position, whose data ``pump`` moves."""

    def __init__(self, group: Group, links: Mapping[int, Link], pump: Pump) -> None:
        here = group.hosts[group.position]
        self._neighbours = [position for position in links if group.hosts[position] == here]
        self._cores: dict[int, int] = {}
        self._placement = Placement()
        self._late = 0.0
        self._links = links
        self._pump = pump
        self._question: _Question | None = None
        self._round = 0
        self._value = 0
        self._absent: set[int] = set()
        self._differs = False
        self._landing = Workspace()

    @property
    def is_asking(self) -> bool:
        """Whether the next exchange carries a vote."""
        return self._question is not None

    def ask(self, value: int, waiting: Callable[[list[int]], None], agreed: Callable[[], None]) -> None:
        """Vote for ``value``, which is not 0, with the next exchange: it raises Disagreement if not all do so.

        It raises as soon as one other member has voted for anything else, and waits as long as that is not known. Then
        ``waiting`` is called every few milliseconds with the positions of the members that have not voted. As soon as
        all have voted for ``value``, ``agreed`` is called.
        """
        self._question = _Question(value, waiting, agreed)

    def withdraw(self) -> None:
        """Take the question back, if no exchange has carried it."""
        self._question = None

    def decline(self) -> None:
        """Vote for nothing. Neither waits nor raises: the next exchange tells if a member is lost."""
        self._cast(0, {}, {})
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before, as far as possible. Does not raise."""
        with suppress(HorovodInternalError):
            self._pump.flush()

    def carry(
        self, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> tuple[dict[int, Views], dict[int, Views]]:
        """Ask, and exchange the short ones of the messages to and from other members, by position.

        ``spare``: the memory for incoming ones is of no worth, and may be written before all have agreed. Returns the
        messages that are left.
        """
        question, self._question = self._question, None
        assert question is not None
        taken = {position: views for position, views in incoming.items() if _rides(views)}
        landing = {position: views[0] for position, views in taken.items()} if spare else self._rooms(taken)
        self._cast(question.value, {key: views for key, views in outgoing.items() if _rides(views)}, landing)
        self._await_votes(question)
        self._pump.run()
        if not spare:
            for position, views in taken.items():
                _scatter(landing[position], views)
        return _others(outgoing), _others(incoming)

    def waited(self) -> float:
        """How long this member has waited for votes since the last call, in seconds."""
        late, self._late = self._late, 0.0
        return late

    def _await_votes(self, question: _Question) -> None:
        begin = monotonic()
        self._pump.run_until(self._is_decided, self._look_around, lambda: question.waiting(sorted(self._absent)))
        self._late += monotonic() - begin
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
            link.send((memoryview(HEAD.pack(value, _length(views), core)), *views))
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
        while length:
            dropped = min(length, DROPPED)
            yield memoryview(bytearray(dropped))
            length -= dropped

    def _riding(self, position: int, length: int, target: memoryview | None) -> Script:
        expected = 0 if target is None else len(target)
        if length != expected:
            raise EngineError(f"the member at position {position} sent {length} bytes, and {expected} were expected")
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
        lengths = {position: _length(views) for position, views in messages.items()}
        rooms = memory(self._landing.take(sum(lengths.values()), DType.UINT8))
        found, start = {}, 0
        for position, length in lengths.items():
            found[position] = rooms[start : start + length]
            start += length
        return found


def _length(views: Views) -> int:
    return sum(map(len, views))


def _rides(views: Views) -> bool:
    return 0 < _length(views) <= RIDING


def _others(messages: Mapping[int, Views]) -> dict[int, Views]:
    return {position: views for position, views in messages.items() if _length(views) > RIDING}


def _scatter(source: memoryview, targets: Views) -> None:
    start = 0
    for target in targets:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)[start : start + len(target)])
        start += len(target)
