"""The member of a star that gets the votes of all others, answers them, and passes their short messages on."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from collectives.api import DType
from collectives.backends.group import Group
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
from collectives.backends.tcp.parcels import Parcel
from collectives.backends.tcp.pump import Pump
from collectives.backends.tcp.star import ABSENT, AGREED, DIFFERS, HUB, VOTE, Answers, riding
from collectives.backends.workspace import Workspace

__all__ = ["Hub"]

TELL_SECONDS = 0.1
"""How long after its own vote, and after each note, the hub tells the others which members have not voted."""
NOTHING = memoryview(b"")


class Hub(Ballot):
    """See :class:`Ballot`, for the hub of ``group``."""

    def __init__(self, group: Group, links: Mapping[int, Link], pump: Pump) -> None:
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

    def decline(self) -> None:
        """See :class:`Ballot`."""
        self._open(0)
        self._refuse()

    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        self._open(question.value)
        self._await(self._is_decided, lambda: self._wait(question))
        if self._differs:
            self._refuse()
            raise Disagreement
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
