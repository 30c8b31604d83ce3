"""Every member of a star but the hub: it sends its vote, and gets the answer for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from collectives.backends.group import Group
from collectives.backends.tcp.ballot import RIDING, Ballot, Disagreement, Question, Views, check_length, length_of
from collectives.backends.tcp.link import Link, Script
from collectives.backends.tcp.parcels import pack
from collectives.backends.tcp.pump import Pump
from collectives.backends.tcp.star import ABSENT, AGREED, HUB, VOTE, Answers, riding

__all__ = ["Spoke"]


class Spoke(Ballot):
    """See :class:`Ballot`, for a member of ``group`` that is not its hub."""

    def __init__(self, group: Group, links: Mapping[int, Link], pump: Pump) -> None:
        super().__init__(links, pump, riding(group.size, RIDING))
        self._group = group
        self._link = links[HUB]
        self._answers = Answers(group.size)
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
        self._cast(question.value, outgoing, self._wanted(incoming, question.agreed))
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
