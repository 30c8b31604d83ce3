"""The member of a star that gets the votes of all others, answers them, and passes their short messages on."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from collectives.api import DType, EngineError
from collectives.backends.group import Group
from collectives.backends.tcp.ballot import RIDING, Ballot, Disagreement, Question, Views, dropped, length_of, scatter
from collectives.backends.tcp.link import Link, Script, memory
from collectives.backends.tcp.parcels import Parcel
from collectives.backends.tcp.pump import Pump
from collectives.backends.tcp.star import ABSENT, AGREED, ANSWER, DIFFERS, HUB, VOTE, riding
from collectives.backends.workspace import Workspace

__all__ = ["Hub"]


class Hub(Ballot):
    """See :class:`Ballot`, for the hub of ``group``."""

    def __init__(self, group: Group, links: Mapping[int, Link], pump: Pump) -> None:
        super().__init__(links, pump, riding(group.size, RIDING))
        self._group = group
        self._round = 0
        self._value = 0
        self._absent: set[int] = set()
        self._told: set[int] = set()
        self._differs = False
        self._parcels: dict[int, Parcel] = {}
        self._rooms = {position: Workspace() for position in links}

    def decline(self) -> None:
        """See :class:`Ballot`."""
        self._open(0)
        self._answer_all(DIFFERS)
        self.flush()

    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        self._open(question.value)
        self._await(self._is_decided, lambda: self._wait(question))
        if self._differs:
            self._value = 0
            self._answer_all(DIFFERS)
            self.flush()
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
        content = memory(self._rooms[position].take(length, DType.UINT8))
        if length:
            yield content
        if round == self._round:
            self._parcels[position] = Parcel(form, content, self._group.size)
            self._absent.discard(position)

    def _is_decided(self) -> bool:
        return self._differs or not self._absent

    def _wait(self, question: Question) -> None:
        """Tell those that have voted which members they wait for, once for each answer to that."""
        if self._absent != self._told:
            self._told = set(self._absent)
            names = memoryview(struct.pack(f"<{len(self._absent)}I", *sorted(self._absent)))
            for position in self._links.keys() - self._absent:
                self._links[position].send((memoryview(ANSWER.pack(ABSENT, len(names))), names))
        question.waiting(sorted(self._absent))

    def _answer_all(self, kind: int) -> None:
        for link in self._links.values():
            link.send((memoryview(ANSWER.pack(kind, 0)),))

    def _pass_on(self, outgoing: Mapping[int, Views]) -> None:
        """Send each member what the others, and this one, have for it."""
        for position, link in self._links.items():
            parts = [self._parcels[other].to(position) for other in self._links if other != position]
            views = [*outgoing.get(position, ()), *filter(None, parts)]
            link.send((memoryview(ANSWER.pack(AGREED, length_of(views))), *views))

    def _take(self, incoming: Mapping[int, Views]) -> None:
        for position, views in incoming.items():
            part, expected = self._parcels[position].to(HUB), length_of(views)
            if len(part) != expected:
                where = self._group.describe([position])
                raise EngineError(f"{where} sent {len(part)} bytes, and {expected} were expected")
            scatter(part, views)
