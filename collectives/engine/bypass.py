"""How the ranks decide which tensors run next: by messages to the coordinator, or past it, by a vote."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from collectives.api import Request, override
from collectives.backends.base import Backend, Vote
from collectives.backends.completion import Completion
from collectives.controller.messages import Refuse, Response, Run, Unknown, Withdraw
from collectives.controller.schedules import Schedule
from collectives.controller.worker import Batch, Refusal, Worker
from collectives.engine.execution import execute
from collectives.engine.link import Link
from collectives.engine.observers import TrialReporter
from collectives.engine.work import Work

Meanwhile = Callable[[Sequence[int]], bool]
"""Called every few milliseconds while a trial waits, with the ranks that have not entered its round yet. It returns
whether this rank has other work. It does not raise: an end of the engine aborts the backends instead."""


Follow = Callable[[Completion, Sequence[Work], int, Backend], None]
"""The end of an operation that has begun, its works, the number of its batch, and its backend."""


class DecidedBatches:
    """Batches that will run on all of their ranks and have not run on this rank, in order.

    ``since`` is when the first of them was decided, in seconds of ``time.monotonic()``.
    """

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self.since = 0.0

    def __bool__(self) -> bool:
        return bool(self.batches)

    def add(self, batches: Iterable[Batch]) -> None:
        """Append ``batches``."""
        if not self.batches:
            self.since = time.monotonic()
        self.batches.extend(batches)


class Attempt:
    """The argument of a trial: the works of each batch, and how to run them.

    ``follow`` is called with each batch that all ranks run, when it has begun. ``reporter`` tells observers about the
    batches; None where there are no observers. ``meanwhile`` should be called every few milliseconds until it is known
    whether all ranks run the trial. ``begun`` are the operations that have begun and that nobody follows yet.
    """

    __slots__ = ("_agreed", "_follow", "_reporter", "backend", "batches", "begun", "first", "meanwhile", "works")

    def __init__(
        self,
        first: int,
        batches: Sequence[Sequence[Response]],
        works: Sequence[Sequence[Work]],
        backend: Backend,
        follow: Follow,
        reporter: TrialReporter | None,
        meanwhile: Meanwhile,
    ) -> None:
        self.first = first
        self.batches = batches
        self.works = works
        self.backend = backend
        self.meanwhile = meanwhile
        self._follow = follow
        self._reporter = reporter
        self._agreed = False
        self.begun: list[tuple[Completion, Sequence[Work], int]] = []

    def started(self) -> None:
        """All ranks run the trial. Must be called once, as soon as that is known."""
        self._agreed = True
        if self._reporter is not None:
            self._reporter.agreed(self.works)

    def run(self) -> None:
        """Begin all batches; errors of the backend propagate. A batch may be over before the next one begins."""
        for number, (works, responses) in enumerate(zip(self.works, self.batches, strict=True), self.first):
            if self._reporter is not None:
                self._reporter.begin(number, works)
            self.begun.append((execute(works, responses, self.backend), works, number))
            if self._agreed:
                self.follow()

    def follow(self) -> None:
        """All ranks run the batches that have begun."""
        begun, self.begun = self.begun, []
        for completion, works, number in begun:
            self._follow(completion, works, number, self.backend)


class Trial(ABC):
    """Batches of one process set that run now if all of its ranks try the same; if not, nothing changes."""

    first: int
    """The number of the first batch, the same on all ranks; the others follow."""
    batches: Sequence[Sequence[Response]]

    @abstractmethod
    def run(self, attempt: Attempt) -> bool:
        """Run the batches and set the outputs of their works; return whether they ran, on all ranks or on none.

        No destination may be written before all ranks are known to run the trial. Errors of the backend propagate.
        """


class Decider(ABC):
    """Decides which tensors run next. For the thread that drives the engine, one at a time.

    The deciders of a rank form a chain: each passes what it does not decide to its fallback (:class:`Outer`). The
    exchange knows the outermost only. In each step, it calls :meth:`next` until that returns None, then receives
    messages, and runs the batches in ``decided``.

    All deciders of a rank share ``worker``, which records the tensors that this rank submits.
    """

    def __init__(self, worker: Worker, decided: DecidedBatches) -> None:
        self.worker = worker
        self.decided = decided

    def submit(self, request: Request, urgent: bool) -> None:
        """A tensor is ready on this rank; ``urgent`` when a caller waits for it."""
        self.worker.submit(request, urgent)

    def reject(self, request: Request, reason: str) -> None:
        """A call failed on this rank because of its arguments: members that submit the tensor must not wait for it."""
        self.worker.reject(request, reason)

    def abandon(self, key: tuple[int, str]) -> Refusal | None:
        """This rank does not want a tensor any more that it has submitted. Returns its end, if that has come."""
        return self.worker.abandon(key)

    def urge(self, key: tuple[int, str]) -> None:
        """A caller waits for a tensor that was submitted earlier; one that is not in flight any more is ignored."""
        self.worker.urge(key)

    def repeat(self, request: Request) -> Trial | None:
        """The trial of ``request`` alone, which a caller waits for and which was not submitted; None if there is none.

        There is one only if this rank submitted the same request before, and has nothing else to decide. If the trial
        does not run, the request must be submitted.
        """
        return None

    @abstractmethod
    def next(self) -> Trial | None:
        """The trial to run now, or None.

        When there is none, the coordinator has all news of this rank, or a decider holds tensors back that no caller
        waits for.
        """

    @abstractmethod
    def decline(self) -> None:
        """Return no trial until the ranks begin again together: this rank has a message for the coordinator.

        Must also be called after a trial of :meth:`next` that did not run.
        """

    @abstractmethod
    def ran(self, batch: Batch) -> None:
        """The decided ``batch`` has run on this rank."""


class Outer(Decider):
    """A decider with a ``fallback``, to which it passes everything unless a subclass does otherwise."""

    def __init__(self, fallback: Decider) -> None:
        super().__init__(fallback.worker, fallback.decided)
        self.fallback = fallback

    @override
    def next(self) -> Trial | None:
        return self.fallback.next()

    @override
    def decline(self) -> None:
        self.fallback.decline()

    @override
    def ran(self, batch: Batch) -> None:
        self.fallback.ran(batch)


LARGEST = 0xFFFFFFFF
"""The largest number that a board can compare; schedules with larger ones are negotiated."""
LATE_SECONDS = 0.25
"""A rank that has waited this long asks the ranks that have not reached the round to decline it."""


class Rounds:
    """Every rank does one of two things in each round: it attempts a schedule on the ``board``, or it declines.

    When all ranks attempt the same schedule, it runs. A round where not all do is the last, until all ranks
    :meth:`begin` again at one point of their order. ``on``: whether another round follows. All deciders of a rank share
    the rounds, and put numbers of their own :meth:`lane` on the board. The schedules are of tensors of ``worker``.
    """

    def __init__(self, board: Vote | None, worker: Worker, link: Link) -> None:
        self.on = False
        self.worker = worker
        self.link = link
        self._board = board
        self._round = 0
        self._withdrawn = 0
        self._asked = 0
        self._ask_again = 0.0
        self._pause = LATE_SECONDS
        self._lanes = 0

    def lane(self) -> int:
        """The lane of one more decider. Every rank has the same deciders, which take their lanes in the same order."""
        self._lanes += 1
        return self._lanes - 1

    def begin(self, is_busy: bool) -> None:
        """Start the rounds, as the coordinator told all ranks; without a board, do nothing.

        A rank that ``is_busy`` with something else declines the first round: other ranks may wait in it.
        """
        self.on = self._board is not None
        if is_busy or self._round < self._withdrawn:
            self.decline()

    def attempt(
        self,
        lane: int,
        schedule: int,
        call: Callable[[], None],
        agreed: Callable[[], None],
        waiting: Callable[[int, list[int]], None],
    ) -> bool:
        """Run ``call`` if all ranks attempt ``schedule``, a number; otherwise the rounds end. Return whether they do.

        Until that is known, ``waiting`` is called repeatedly, with the round and the ranks that have not reached it. If
        all ranks attempt ``schedule``, ``agreed`` is called then.
        """
        board, round, number = self._board, self._round + 1, schedule * self._lanes + lane
        if board is None or not self.on or number > LARGEST:
            return False
        self._round = round
        self.on = board.attempt(number, call, lambda absent: waiting(round, absent), agreed)
        return self.on

    def decline(self) -> None:
        """End the rounds, if they are on: this rank has a message for the coordinator."""
        if self._board is not None and self.on:
            self._round += 1
            self._board.decline()
            self.on = False

    def ask_to_withdraw(self, round: int) -> None:
        """Let the ranks that have not reached ``round`` decline it, and those that have left it show that.

        This may be called all the time: it asks now and then, because an answer may not fit into a connection yet.
        """
        now = time.monotonic()
        if self._asked < round:
            self._asked, self._pause = round, LATE_SECONDS
        elif now < self._ask_again:
            return
        self._ask_again, self._pause = now + self._pause, 2 * self._pause
        self.link.tell_all(Withdraw(round))

    def withdraw(self, message: Withdraw) -> None:
        """Decline a round, if this rank has not reached it: other ranks have waited in it for long.

        The request may come before :meth:`begin`, from a rank that has already run the same batch of empty tensors.
        """
        self._withdrawn = max(self._withdrawn, message.round)
        if self._round < self._withdrawn:
            self.decline()
        elif self._board is not None:
            self._board.hurry()
            if self.link.reaches_all and self._round == message.round:  # the one that has left may be a third rank
                self.ask_to_withdraw(message.round)


class ScheduledTrial(Trial):
    """Attempts ``schedule``, of tensors that only this rank knows to be in flight, in the next round.

    ``lane`` is that of the decider.
    """

    def __init__(self, rounds: Rounds, lane: int, schedule: Schedule) -> None:
        self.first = rounds.worker.next_batch
        self.batches = schedule.batches
        self._rounds = rounds
        self._lane = lane
        self._schedule = schedule
        self._since: float | None = None
        self._attempt: Attempt | None = None

    @override
    def run(self, attempt: Attempt) -> bool:
        self._attempt = attempt
        rounds, schedule = self._rounds, self._schedule
        if not rounds.attempt(self._lane, schedule.number, attempt.run, attempt.started, self._wait):
            return False
        rounds.worker.finish_schedule(schedule)
        rounds.link.used(schedule)
        return True

    def _wait(self, round: int, absent: Sequence[int]) -> None:
        wanted = self._attempt is not None and self._attempt.meanwhile(absent)
        if wanted or self._is_late():
            self._rounds.ask_to_withdraw(round)

    def _is_late(self) -> bool:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now > self._since + LATE_SECONDS


class Bypass(Outer):
    """Tries the tensors that this rank has in flight, if the ranks know a schedule of exactly these.

    When all ranks attempt the same schedule, it runs, at the same point of all ranks' orders, because no rank has
    anything else in flight.
    """

    def __init__(self, rounds: Rounds, fallback: Decider) -> None:
        super().__init__(fallback)
        self.rounds = rounds
        self._lane = rounds.lane()

    @override
    def next(self) -> Trial | None:
        if self.rounds.on:
            schedule = self.worker.schedule()
            if schedule is not None:
                return ScheduledTrial(self.rounds, self._lane, schedule)
        return self.fallback.next()

    @override
    def repeat(self, request: Request) -> Trial | None:
        if self.rounds.on and not self.decided.batches:
            schedule = self.worker.repeat(request)
            if schedule is not None:
                return ScheduledTrial(self.rounds, self._lane, schedule)
        return None


class Outcomes(Protocol):
    """The receiver of the coordinator's answers."""

    def announce(self, batches: Sequence[Batch]) -> None:
        """The batches will run."""

    def refuse(self, refusal: Refusal) -> None:
        """The tensor will not run."""


class Negotiated(Decider):
    """Sends the news of ``worker`` to the coordinator, and decides as it answers.

    The coordinator also lets the ``rounds`` of other deciders begin, and this rank declines one before it sends news.
    ``runner`` learns of the batches that will run, and of the tensors that will not. The handlers of messages are
    :meth:`run`, :meth:`refuse` and :meth:`resend`.
    """

    def __init__(self, worker: Worker, link: Link, rounds: Rounds, runner: Outcomes) -> None:
        super().__init__(worker, DecidedBatches())
        self._link = link
        self._rounds = rounds
        self._runner = runner

    @override
    def next(self) -> None:
        ready = self.worker.outgoing()
        if ready is not None:
            if self._rounds.on:
                self._rounds.decline()
            self._link.tell(ready)

    @override
    def decline(self) -> None:
        self._rounds.decline()

    @override
    def ran(self, batch: Batch) -> None:
        if batch.begins_rounds:
            self._rounds.begin(bool(self.decided) or not self.worker.is_idle or self._link.is_changing)

    # Messages.

    def run(self, message: Run) -> None:
        """The coordinator decided these batches."""
        batches = self.worker.run(message)
        self._runner.announce(batches)
        self.decided.add(batches)

    def refuse(self, message: Refuse) -> None:
        """The ranks disagree about a tensor."""
        self._runner.refuse(self.worker.refuse(message))

    def resend(self, message: Unknown) -> None:
        """The coordinator has dropped these ids."""
        self.worker.resend(message)
