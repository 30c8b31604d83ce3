"""Rounds of votes through one member, the *hub*, for members that share cores.

A member that waits is woken by each frame that it gets. In a mesh those are as many as there are other members, and
each may cost a change of context, where ranks share cores. In a star each member but the hub sends one frame and gets
one: its vote with its short messages, and then, if all agree, the messages of the others. The frames of a round are::

    to the hub       the vote, the form of the parcel behind it, its length, and the parcel (parcels.py)
    from the hub     AGREED, the length of the message of each member, and the messages; or DIFFERS; before that, where
                     the hub waits for long, ABSENT with a mark for each member that has not voted

The hub answers DIFFERS as soon as it knows of another vote, or declines itself: no member can leave a round before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from time import monotonic

from collectives.api import DType, override
from collectives.backends.base import Group
from collectives.backends.host import Workspace
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
from collectives.backends.tcp.link import Script, TcpLink, memory
from collectives.backends.tcp.pump import Pump

EACH, SAME = 0, 1
"""How a parcel begins: with the lengths of the messages to each member, or with one message to all others."""


def pack(messages: Mapping[int, Views], size: int, position: int) -> tuple[int, Sequence[memoryview]]:
    """How the parcel begins, and its parts: the messages of the member at ``position`` of ``size`` members."""
    if not messages:
        return EACH, ()
    first = next(iter(messages.values()))
    if len(messages) == size - 1 and all(views is first for views in messages.values()):
        return SAME, first
    found = [messages.get(other, ()) for other in range(size)]
    lengths = memoryview(_lengths(size).pack(*map(length_of, found)))
    return EACH, [lengths, *(view for views in found for view in views)]


class Parcel:
    """The ``content`` that :func:`pack` made, on the side of the member that passes it on."""

    def __init__(self, form: int, content: memoryview, size: int) -> None:
        self._whole = content if form == SAME else None
        self._parts: Sequence[memoryview] = ()
        if form == EACH and content:
            lengths = _lengths(size)
            ends = accumulate(lengths.unpack_from(content), initial=lengths.size)
            self._parts = [content[start:end] for start, end in pairwise(ends)]

    def to(self, position: int) -> memoryview:
        """The message to the member at ``position``, which may be empty."""
        if self._whole is not None:
            return self._whole
        return self._parts[position] if self._parts else memoryview(b"")


def _lengths(size: int) -> struct.Struct:
    return struct.Struct(f"<{size}I")


HUB = 0
"""The position of the member that all others send their votes to."""

VOTE = struct.Struct("<III")
"""The number that a member votes for, the form of its parcel, and the length of that."""
AGREED, DIFFERS, ABSENT = 1, 2, 3

MOST_PASSED_ON = 1 << 20


def riding(size: int, most: int) -> int:
    """The longest message, in bytes, that travels through the hub of ``size`` members, which sends them one by one."""
    return min(most, MOST_PASSED_ON // (size - 1) ** 2)


class Answers:
    """The frames from the hub of ``size`` members, without the messages: all have the same length."""

    def __init__(self, size: int) -> None:
        self._format = struct.Struct(f"<{1 + size}I")
        self._nothing = [0] * size

    def pack(self, kind: int, numbers: Sequence[int] = ()) -> memoryview:
        """An answer with a number for each member, by default 0."""
        return memoryview(self._format.pack(kind, *(numbers or self._nothing)))

    def room(self) -> memoryview:
        """Memory for an answer."""
        return memoryview(bytearray(self._format.size))

    def unpack(self, answer: memoryview) -> tuple[int, Sequence[int]]:
        """The kind, and the numbers."""
        kind, *numbers = self._format.unpack(answer)
        return kind, numbers


TELL_SECONDS = 0.1
"""How long after its own vote, and after each note, the hub tells the others which members have not voted."""
NOTHING = memoryview(b"")


class Hub(Ballot):
    """A :class:`Ballot`, for the hub of ``group``."""

    def __init__(self, group: Group, links: Mapping[int, TcpLink], pump: Pump) -> None:
        super().__init__(links, pump, riding(group.size, RIDING))
        self._group = group
        self._answers = Answers(group.size)
        self._round = 0
        self._value = 0
        self._absent: set[int] = set()
        self._told: set[int] = set()
        self._tell_at = 0.0
        self._differs = False
        self._parcels: dict[int, Parcel] = {}
        self._rooms = {position: Workspace() for position in links}

    @override
    def decline(self) -> None:
        self._open(0)
        self._refuse()

    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        self._open(question.value)
        self._await(self._is_decided, lambda: self._wait(question))
        if self._differs:
            self._refuse()
            raise BallotDisagreement
        question.agreed()
        self._pass_on(outgoing)
        self._pump.run()
        self._take(incoming)

    def _open(self, value: int) -> None:
        """Begin the next round."""
        self._round += 1
        self._value, self._differs = value, False
        self._absent, self._told = set(self._links), set(self._links)
        self._tell_at = monotonic() + TELL_SECONDS
        for position, link in self._links.items():
            link.receive(self._frame(position, self._round))

    def _frame(self, position: int, round: int) -> Script:
        """Receive the vote of a member in ``round``, and its parcel if that is wanted then."""
        head = bytearray(VOTE.size)
        yield memoryview(head)
        value, form, length = VOTE.unpack(head)
        if round != self._round or value != self._value or not value:
            self._differs |= round == self._round
            yield from dropped(length)
            return
        content = NOTHING
        if length:
            content = memory(self._rooms[position].take(length, DType.UINT8))
            yield content
        if round == self._round:
            self._parcels[position] = Parcel(form, content, self._group.size)
            self._absent.discard(position)

    def _is_decided(self) -> bool:
        return self._differs or not self._absent

    def _wait(self, question: Question) -> None:
        """Tell those that have voted, now and then, which members they wait for."""
        now = monotonic()
        if now >= self._tell_at and self._absent != self._told:
            self._told, self._tell_at = set(self._absent), now + TELL_SECONDS
            answer = self._answers.pack(ABSENT, [position in self._absent for position in range(self._group.size)])
            for position in self._links.keys() - self._absent:
                self._links[position].send((answer,))
        question.waiting(sorted(self._absent))

    def _refuse(self) -> None:
        """All members leave the round."""
        self._value = 0
        for link in self._links.values():
            link.send((self._answers.pack(DIFFERS),))
        self.flush()

    def _pass_on(self, outgoing: Mapping[int, Views]) -> None:
        """Send each member what the others, and this one, have for it."""
        for position, link in self._links.items():
            own = outgoing.get(position, ())
            others = range(1, self._group.size)
            parts = [self._parcels[other].to(position) if other != position else NOTHING for other in others]
            link.send((self._answers.pack(AGREED, [length_of(own), *map(len, parts)]), *own, *filter(None, parts)))

    def _take(self, incoming: Mapping[int, Views]) -> None:
        for position, parcel in self._parcels.items():
            part, views = parcel.to(HUB), incoming.get(position, ())
            check_length(self._group, position, len(part), length_of(views))
            scatter(part, views)


class Spoke(Ballot):
    """A :class:`Ballot`, for a member of ``group`` that is not its hub."""

    def __init__(self, group: Group, links: Mapping[int, TcpLink], pump: Pump) -> None:
        super().__init__(links, pump, riding(group.size, RIDING))
        self._group = group
        self._link = links[HUB]
        self._answers = Answers(group.size)
        self._absent: Sequence[int] = ()
        self._answer = 0

    @override
    def decline(self) -> None:
        self._cast(0, {}, self._unwanted())
        self.flush()

    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        self._answer = 0
        self._cast(question.value, outgoing, self._wanted(incoming, question.agreed))
        self._await(self._is_decided, lambda: question.waiting(list(self._absent)))
        if self._answer != AGREED:
            self._link.give_up(is_filling=False)
            raise BallotDisagreement
        self._pump.run()

    def _cast(self, value: int, outgoing: Mapping[int, Views], script: Script) -> None:
        form, parts = pack(outgoing, self._group.size, self._group.position)
        self._link.send((memoryview(VOTE.pack(value, form, length_of(parts))), *parts))
        self._link.receive(script)

    def _is_decided(self) -> bool:
        return self._answer != 0

    def _wanted(self, incoming: Mapping[int, Views], agreed: Callable[[], None]) -> Script:
        """Receive the answer, and if all agree the messages behind it: they do before anything is in ``incoming``."""
        self._absent = (HUB,)
        while True:
            yield (room := self._answers.room())
            kind, numbers = self._answers.unpack(room)
            if kind != ABSENT:
                break
            self._absent = [position for position, is_absent in enumerate(numbers) if is_absent]
        if kind == AGREED:
            self._check(numbers, incoming)
            agreed()
        self._answer = kind
        if kind == AGREED:
            for position in sorted(incoming):
                yield from incoming[position]

    def _check(self, lengths: Sequence[int], incoming: Mapping[int, Views]) -> None:
        expected = [length_of(incoming.get(position, ())) for position in range(self._group.size)]
        if expected == lengths:
            return
        for position, length in enumerate(lengths):
            check_length(self._group, position, length, expected[position])

    def _unwanted(self) -> Script:
        """Receive the answer to a vote for nothing, which is one."""
        yield self._answers.room()
