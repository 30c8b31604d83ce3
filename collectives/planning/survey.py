"""Pure: which ranks rank 0 has asked where they stand, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collectives.planning.waiting import Key, Pending
from collectives.planning.whereabouts import Activity, ProcessState, Whereabouts, describe, describe_silent

__all__ = ["Survey"]

ASKED_RANKS = 8
"""A report tells of so many ranks; a stall of more has one cause, which these show."""


class _Answer(NamedTuple):
    asked: float
    heard: float
    found: Whereabouts


class Survey:
    """The questions and the answers. It has no clock: the caller passes the time, in monotonic seconds."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._answers: dict[int, _Answer] = {}

    def ask(self, ranks: Sequence[int], since: float) -> list[int]:
        """The first of ``ranks`` that have to be asked now, because they have given no answer since ``since``.

        A rank that is silent is asked no second time: it still has the first question.
        """
        new = [rank for rank in ranks[:ASKED_RANKS] if rank not in self._asked and not self._has(rank, since)]
        self._asked.update(dict.fromkeys(new, since))
        return new

    def hear(self, found: Whereabouts, now: float) -> None:
        """A rank answers."""
        self._answers[found.rank] = _Answer(self._asked.pop(found.rank, now), now, found)

    def answer(self, rank: int, since: float) -> Whereabouts | None:
        """The answer that ``rank`` has given since ``since``, if it has."""
        return self._answers[rank].found if self._has(rank, since) else None

    def answer_to(self, rank: int, question: float) -> Whereabouts | None:
        """The answer of ``rank`` to a question of the time ``question`` or a later one, if it has answered."""
        answer = self._answers.get(rank)
        return None if answer is None or answer.asked < question else answer.found

    def is_complete(self, ranks: Sequence[int], since: float) -> bool:
        """Whether the first of ``ranks`` have all answered since ``since``."""
        return all(self._has(rank, since) for rank in ranks[:ASKED_RANKS])

    def cleared(self, pending: Pending, since: float) -> Pending:
        """``pending`` without the ranks that have answered since ``since`` that they wait for that tensor themselves.

        They have submitted it, but a rank that speaks for them has not passed that on. Where all have, nothing changes.
        """
        result = dict(pending)
        for key, waiting in pending.items():
            waits = {rank for rank in waiting.missing if self._waits_for(rank, key, since)}
            if waits and (missing := tuple(rank for rank in waiting.missing if rank not in waits)):
                result[key] = waiting._replace(missing=missing, submitted=tuple(sorted({*waiting.submitted, *waits})))
        return result

    def _waits_for(self, rank: int, key: Key, since: float) -> bool:
        found = self.answer(rank, since)
        if found is None or found.activity is not Activity.WAITS:
            return False
        return key in {(call.process_set, call.name) for call in found.waits}

    def _has(self, rank: int, since: float) -> bool:
        return rank in self._answers and self._answers[rank].heard >= since

    def describe(self, ranks: Sequence[int], since: float, processes: Mapping[int, ProcessState]) -> list[str]:
        """Where the first of ``ranks`` stand, or why they may be silent, as far as ``processes`` tell."""
        return [
            describe(self._answers[rank].found)
            if self._has(rank, since)
            else f"rank {rank} does not answer. {describe_silent((rank,), processes)}"
            for rank in ranks[:ASKED_RANKS]
        ]
