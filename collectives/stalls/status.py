"""Where ranks stand: rank 0 asks them, and each of them finds out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from collectives.api import Request
from collectives.controller.waits import (
    Activity,
    CallInFlight,
    Key,
    Pending,
    ProcessState,
    RankStatus,
    activity,
    describe,
    describe_silent,
)
from collectives.controller.worker import Worker
from collectives.stalls.stacks import busy, is_idle, look, read_stacks, region

logger = logging.getLogger(__name__)


ASKED_RANKS = 8
"""A report tells of so many ranks; a stall of more has one cause, which these show."""


class _Answer(NamedTuple):
    asked: float
    heard: float
    found: RankStatus


class StatusTable:
    """The questions and the answers. It has no clock: the caller passes the time, in monotonic seconds.

    ``leaders`` has the ranks whose answers another rank passes on.
    """

    def __init__(self, leaders: Mapping[int, int] | None = None) -> None:
        self._leaders = leaders or {}
        self._asked: dict[int, float] = {}
        self._answers: dict[int, _Answer] = {}
        self._questions: list[int] = []

    def ask(self, ranks: Sequence[int], since: float) -> None:
        """Ask the first of ``ranks``, soon, if they have given no answer since ``since``: see :meth:`take_questions`.

        A rank that is silent is asked no second time: it still has the first question.
        """
        new = [rank for rank in ranks[:ASKED_RANKS] if rank not in self._asked and not self._has(rank, since)]
        self._asked.update(dict.fromkeys(new, since))
        self._questions += new

    def take_questions(self) -> Sequence[int]:
        """The ranks to which the question goes out now."""
        questions, self._questions = self._questions, []
        return questions

    def hear(self, found: RankStatus, now: float) -> None:
        """A rank answers."""
        self._answers[found.rank] = _Answer(self._asked.pop(found.rank, now), now, found)

    def answer(self, rank: int, since: float) -> RankStatus | None:
        """The answer that ``rank`` has given since ``since``, if it has."""
        return self._answers[rank].found if self._has(rank, since) else None

    def answer_to(self, rank: int, question: float) -> RankStatus | None:
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
            else self._silence(rank, ranks, since, processes)
            for rank in ranks[:ASKED_RANKS]
        ]

    def _silence(self, rank: int, ranks: Sequence[int], since: float, processes: Mapping[int, ProcessState]) -> str:
        leader = self._leaders.get(rank)
        if leader is not None and leader in ranks and not self._has(leader, since):
            return f"rank {rank} cannot answer without rank {leader}, which passes its messages on"
        return f"rank {rank} does not answer. {describe_silent((rank,), processes)}"


LOOK_SECONDS = 0.1
"""The time between two looks at a thread, which tell a thread that computes from one that waits."""

OUR_THREADS = "hvd-"
"""The names of the threads of this project, and of no others, begin with this."""


class InFlightTensor(Protocol):
    """A tensor of this rank: its request, and when it was submitted, in monotonic seconds."""

    @property
    def request(self) -> Request: ...

    @property
    def since(self) -> float: ...


class InFlight(Protocol):
    """The tensors of this rank that are in flight, as the engine has them."""

    running: Any

    @property
    def last(self) -> tuple[Request, float] | None: ...

    def urged(self) -> Sequence[InFlightTensor]: ...

    def since(self) -> dict[tuple[int, str], float]: ...

    def describe(self) -> str: ...

    def about(self) -> dict[str, Any]: ...

    def __bool__(self) -> bool: ...


class StatusProbe:
    """Looks at the thread of this process that calls collectives, and passes the answer to ``send``.

    ``callers`` returns the threads that have made calls, by their identifiers, and whether each is inside of one.
    ``worker`` knows whether rank 0 has still to hear of calls that were made. ``wake`` lets the thread that drives call
    :meth:`look` soon. Both methods are for that thread.
    """

    def __init__(
        self,
        rank: int,
        works: InFlight,
        callers: Callable[[], Mapping[int, bool]],
        worker: Worker,
        send: Callable[[RankStatus], None],
        wake: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._works = works
        self._callers = callers
        self._worker = worker
        self._send = send
        self._wake = wake
        self._thread: threading.Thread | None = None
        self._found: RankStatus | None = None

    def locate(self, _: object = None) -> None:
        """Begin to find out; the answer comes with a later :meth:`look`."""
        if self._thread is None or not self._thread.is_alive():
            # Owned by the probe; ends after LOOK_SECONDS and a few lines of source, which a lost file system may hold
            # up for ever: then there is no answer, and no second thread. Nobody waits for it.
            self._thread = threading.Thread(target=self._find, name=f"hvd-locator-{self._rank}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # too many threads, or the end of the interpreter
                self._fail(error)

    def look(self, in_operation: bool = False) -> None:
        """Send the answer, if it is there. ``in_operation``: messages to this rank, and its calls, wait meanwhile.

        An answer that comes before the news of a call does not count as one of a rank that is held.
        """
        found, self._found = self._found, None
        if found is not None:
            is_current = not (in_operation or self._worker.has_news)
            self._send(found if is_current else replace(found, is_held=False))

    def _find(self) -> None:
        try:
            self._found = self._status()
        except Exception as error:  # noqa: BLE001 - a diagnosis must not harm the job
            self._fail(error)
        else:
            self._wake()

    def _fail(self, error: Exception) -> None:
        logger.warning("rank %d could not find out where it stands", self._rank, exc_info=error)
        self._found = RankStatus(self._rank, Activity.UNKNOWN, last=self._last())
        self._wake()

    def _status(self) -> RankStatus:
        callers = self._callers()
        thread = _caller(callers)
        stacks, held = read_stacks(), self._waits_of_held(callers)
        first, others = look(thread, stacks), {each: look(each, stacks) for each in self._strangers()}
        time.sleep(LOOK_SECONDS)
        stacks = read_stacks()
        second = look(thread, stacks)
        share, waits = busy(first, second), self._waits()
        is_inside = bool(callers.get(thread))
        return RankStatus(
            self._rank,
            activity(not second.has_ended, is_inside, waits, share),
            _name(thread),
            share,
            self._last(),
            waits,
            region(first, second),
            held is not None
            and held == self._waits_of_held(self._callers())
            and all(each in others and is_idle(others[each], look(each, stacks)) for each in self._strangers()),
        )

    def _strangers(self) -> list[int]:
        """The threads of the program that have called no collective."""
        callers = self._callers()
        return [thread for thread in _users() if thread not in callers]

    def _waits_of_held(self, callers: Mapping[int, bool]) -> object | None:
        """The calls in which each thread that calls collectives waits; None if one of them may make another call."""
        is_held = all(callers.get(thread, True) for thread in _users())
        return (self._works.last, self._works.urged()) if is_held else None

    def _last(self) -> CallInFlight | None:
        last = self._works.last
        return None if last is None else _call(*last, time.monotonic())

    def _waits(self) -> tuple[CallInFlight, ...]:
        now = time.monotonic()
        return tuple(_call(work.request, work.since, now) for work in self._works.urged())


def _caller(callers: Mapping[int, bool]) -> int:
    """The main thread if it calls collectives, or else the first thread that does."""
    main = threading.main_thread().ident or 0
    if main in callers or not callers:
        return main
    alive = _alive(callers)
    return alive[0] if alive else next(iter(callers))


def _alive(threads: Mapping[int, bool]) -> Sequence[int]:
    running = {thread.ident for thread in threading.enumerate()}
    return [thread for thread in threads if thread in running]


def _users() -> list[int]:
    """The threads of the program: not ours, nor those that a framework has started, which call on behalf of others."""
    own = [each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    return [each.ident or 0 for each in own if not each.name.startswith(OUR_THREADS)]


def _name(thread: int) -> str:
    names = {each.ident: each.name for each in threading.enumerate()}
    return names.get(thread, str(thread))


def _call(request: Request, since: float, now: float) -> CallInFlight:
    return CallInFlight(request.name, request.process_set, max(0.0, now - since))
