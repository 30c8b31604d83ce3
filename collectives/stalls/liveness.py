"""Pure: which ranks answer when rank 0 asks them, and the rank that an error about waiting names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from collectives.api import CollectiveTimeoutError, HorovodInternalError
from collectives.controller.waits import ProcessState, describe_silent

GRACE_SECONDS = 1.0
"""A rank that has not answered for this time is silent. Others answer within tens of milliseconds."""
MOMENT_SECONDS = 0.1
"""For this time after an accusation and the last answer to it, the rank that caused it may still explain it."""


class Result(NamedTuple):
    """The ``silent`` ranks have not answered for ``seconds``; ``inquirers`` want to know, because of ``accusation``."""

    silent: tuple[int, ...]
    seconds: float
    inquirers: tuple[int, ...]
    accusation: HorovodInternalError | None


class LivenessCheck:
    """The state of rank 0 while it asks ``others``, all other ranks, whether they run.

    A rank that waits cannot know which rank is stopped: the one that it waits for may wait itself. Every rank that runs
    answers, also inside an operation. True while a rank wants the result; ``deadline`` is when :meth:`settle` has it,
    in monotonic seconds. ``leaders`` has the ranks whose answers another rank passes on: where that is silent, theirs
    prove nothing.
    """

    def __init__(self, others: Iterable[int], leaders: Mapping[int, int] | None = None) -> None:
        self._others = tuple(others)
        self._leaders = leaders or {}
        self._asked: dict[int, float] = {}
        self._inquirers: set[int] = set()
        self._accusation: HorovodInternalError | None = None
        self._accused = 0.0
        self._answered = 0.0

    def __bool__(self) -> bool:
        return bool(self._inquirers) or self._accusation is not None

    @property
    def is_accused(self) -> bool:
        """Whether a rank has given up, and the verdict is still to come."""
        return self._accusation is not None

    @property
    def deadline(self) -> float | None:
        """The result; None where no rank wants it."""
        if not self:
            return None
        if self._accusation is None:
            return max(self._asked.values(), default=0.0) + GRACE_SECONDS
        return min([asked + GRACE_SECONDS for asked in self._asked.values()], default=self._moment_end)

    @property
    def _moment_end(self) -> float:
        """When an accusation counts although all ranks run. A rank may answer just before it explains."""
        return max(self._accused, self._answered) + MOMENT_SECONDS

    def inquire(self, rank: int, now: float) -> Sequence[int]:
        """``rank`` has waited for long; returns the ranks to ask now."""
        self._inquirers.add(rank)
        return self._ask(now)

    def accuse(self, error: HorovodInternalError, now: float) -> Sequence[int]:
        """A rank gives up, with ``error``, which may name the wrong ranks; returns the ranks to ask now."""
        if self._accusation is None:
            self._accusation, self._accused = error, now
        return self._ask(now)

    def _ask(self, now: float) -> Sequence[int]:
        asked = [rank for rank in self._others if rank not in self._asked]
        self._asked.update(dict.fromkeys(asked, now))
        return asked

    def answered(self, rank: int, now: float) -> None:
        """``rank`` runs."""
        asked = self._asked.pop(rank, None)
        if asked is not None and asked <= self._accused:  # later questions must not put the verdict off again and again
            self._answered = now

    def settle(self, now: float) -> Result | None:
        """The result, once: when all ranks have answered, or have had the time to, or the cause of a failure is known.

        A rank that was silent before is asked no second time: it still has the first question.
        """
        silent = tuple(rank for rank, asked in self._asked.items() if now >= asked + GRACE_SECONDS)
        if not self or not self._is_known(silent, now):
            return None
        silent = self._without_led(frozenset(silent))
        seconds = now - min([self._asked[rank] for rank in silent], default=now)
        result = Result(silent, seconds, tuple(sorted(self._inquirers)), self._accusation)
        self._inquirers.clear()
        self._accusation = None
        return result

    def _without_led(self, silent: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted(rank for rank in silent if self._leaders.get(rank) not in silent))

    def _is_known(self, silent: Sequence[int], now: float) -> bool:
        if self._accusation is None:
            return len(silent) == len(self._asked)
        return bool(silent) or (not self._asked and now >= self._moment_end)


def describe_silence(
    ranks: Sequence[int], hosts: Sequence[str], seconds: float, processes: Mapping[int, ProcessState] | None = None
) -> str:
    """A sentence about ``ranks`` that have not answered for ``seconds``; ``hosts[r]`` is the host of rank r.

    ``processes`` has the states of those on this host.
    """
    names = " and ".join(f"rank {rank} on host {hosts[rank]!r}" for rank in ranks)
    return f"{names}: no answer for {seconds:.1f} s. {describe_silent(ranks, processes or {})}"


def verdict(
    error: HorovodInternalError,
    silent: Sequence[int],
    seconds: float,
    hosts: Sequence[str],
    variable: str,
    processes: Mapping[int, ProcessState] | None = None,
) -> HorovodInternalError:
    """The error that ends the job where a rank gave up with ``error``, and the ``silent`` ranks do not answer.

    ``variable`` bounds the time that an operation waits. ``processes`` has the states of those on this host.
    """
    if silent:
        return CollectiveTimeoutError(f"{describe_silence(silent, hosts, seconds, processes)} ({error})", silent)
    if isinstance(error, CollectiveTimeoutError):
        advice = (
            "Every rank runs, so look at the output of these: one may be slow, or submit other names. Raise "
            f"{variable} if a rank may be that slow"
        )
        return CollectiveTimeoutError(f"{error}. {advice}", error.ranks)
    return error
