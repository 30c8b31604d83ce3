"""Every member of a star but the hub: it sends its vote, and gets the answer for all."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping, Sequence

from collectives.api import EngineError
from collectives.backends.group import Group
from collectives.backends.tcp.ballot import RIDING, Ballot, Disagreement, Question, Views, length_of
from collectives.backends.tcp.link import Link, Script
from collectives.backends.tcp.parcels import pack
from collectives.backends.tcp.pump import Pump
from collectives.backends.tcp.star import ABSENT, AGREED, ANSWER, HUB, VOTE, riding

__all__ = ["Spoke"]


class Spoke(Ballot):
    """See :class:`Ballot`, for a member of ``group`` that is not its hub."""

    def __init__(self, group: Group, links: Mapping[int, Link], pump: Pump) -> None:
        super().__init__(links, pump, riding(group.size, RIDING))
        self._group = group
        self._link = links[HUB]
        self._absent: Sequence[int] = ()
        self._answer = 0

    def decline(self) -> None:
        """See :class:`Ballot`."""
        self._cast(0, {}, self._unwanted())
        self.flush()

    def _vote(
        self, question: Question, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool
    ) -> None:
        self._answer = 0
        views = [view for position in sorted(incoming) for view in incoming[position]]
        self._cast(question.value, outgoing, self._wanted(views, question.agreed))
        self._await(self._is_decided, lambda: question.waiting(list(self._absent)))
        if self._answer != AGREED:
            self._link.give_up(is_filling=False)
            raise Disagreement
        self._pump.run()

    def _cast(self, value: int, outgoing: Mapping[int, Views], script: Script) -> None:
        form, parts = pack(outgoing, self._group.size, self._group.position)
        self._link.send((memoryview(VOTE.pack(value, form, length_of(parts))), *parts))
        self._link.receive(script)

    def _is_decided(self) -> bool:
        return self._answer != 0

    def _wanted(self, views: Sequence[memoryview], agreed: Callable[[], None]) -> Script:
        """Receive the answer, and if all agree the data behind it: they do before anything is in ``views``."""
        self._absent = (HUB,)
        kind, length = yield from self._last_answer()
        if kind == AGREED:
            self._check(length, length_of(views))
            agreed()
        self._answer = kind
        if kind == AGREED:
            yield from views

    def _unwanted(self) -> Script:
        """Receive the answer to a vote for nothing."""
        yield from self._last_answer()

    def _last_answer(self) -> Generator[memoryview, None, tuple[int, int]]:
        """The kind of the answer that ends a round, and its length; those before name the absent members."""
        while True:
            head = bytearray(ANSWER.size)
            yield memoryview(head)
            kind, length = ANSWER.unpack(head)
            if kind != ABSENT:
                return kind, length
            names = bytearray(length)
            yield memoryview(names)
            self._absent = struct.unpack(f"<{length // 4}I", names)

    def _check(self, length: int, expected: int) -> None:
        if length != expected:
            raise EngineError(f"{self._group.describe([HUB])} passed {length} bytes on, and {expected} were expected")
