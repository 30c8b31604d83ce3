"""The bypass: tensors that run without the coordinator, because all ranks vote for the same ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from collectives.api import Request
from collectives.backends.base import Backend, Vote
from collectives.backends.completion import Completion
from collectives.controller.messages import Response, Withdraw
from collectives.controller.schedules import Schedule
from collectives.controller.worker import Worker
from collectives.engine.link import Link
from collectives.engine.observers import AttemptReporter
from collectives.engine.runner import Runner
from collectives.engine.work import Work, execute
from collectives.engine.work_table import WorkTable

LARGEST = 0xFFFFFFFF
"""The largest number that a vote can compare; schedules with larger ones are negotiated."""
LATE_SECONDS = 0.25
"""A rank that has waited this long asks the ranks that have not reached the round to decline it."""

DuringVote: TypeAlias = Callable[[Schedule, Sequence[int], float], bool]
"""Called every few milliseconds while an attempt waits, with the ranks that have not entered its round yet and the time
of the first call, in monotonic seconds. It returns whether this rank has other work. It does not raise: an end of the
engine aborts the backends instead."""


class Attempt:
    """The batches of a schedule, which run now if all ranks attempt the same schedule; if not, nothing changes.

    ``first`` is the number of the first batch. ``works`` are those of each batch. ``reporter`` tells observers about
    the batches; None where there are no observers. ``begun`` are the operations that nobody follows yet.
    """

    __slots__ = ("_backend", "_batches", "_first", "_is_agreed", "_reporter", "_runner", "_works", "begun")

    def __init__(
        self,
        first: int,
        batches: Sequence[Sequence[Response]],
        works: Sequence[Sequence[Work]],
        backend: Backend,
        runner: Runner,
        reporter: AttemptReporter | None,
    ) -> None:
        self._first = first
        self._batches = batches
        self._works = works
        self._backend = backend
        self._runner = runner
        self._reporter = reporter
        self._is_agreed = False
        self.begun: list[tuple[Completion, Sequence[Work], int]] = []

    def agree(self) -> None:
        """All ranks run the batches."""
        self._is_agreed = True
        if self._reporter is not None:
            self._reporter.agreed(self._works)

    def run(self) -> None:
        """Begin all batches; errors of the backend propagate. A batch may be over before the next one begins."""
        for number, (works, responses) in enumerate(zip(self._works, self._batches, strict=True), self._first):
            if self._reporter is not None:
                self._reporter.begin(number, works)
            self.begun.append((execute(works, responses, self._backend), works, number))
            if self._is_agreed:
                self.follow()

    def follow(self) -> None:
        """All ranks run the batches that have begun."""
        begun, self.begun = self.begun, []
        for completion, works, number in begun:
            self._runner.follow_attempt(completion, works, number, self._backend)


class Bypass:
    """Runs a schedule of tensors that only this rank knows to be in flight, if all ranks do so now.

    Every rank does one of two things in each round: it attempts a schedule, a number in the ``vote``, or it declines.
    When all ranks attempt the same schedule, it runs on ``backend``, at the same point of all ranks' orders, because no
    rank has anything else in flight. A round where not all do is the last, until all ranks :meth:`begin` again at one
    point of their order. ``on``: whether another round follows. The tensors are those of ``worker`` and ``works``.
    """

    def __init__(
        self, vote: Vote | None, backend: Backend, worker: Worker, link: Link, works: WorkTable, runner: Runner
    ) -> None:
        self.on = False
        self._vote = vote
        self._backend = backend
        self._worker = worker
        self._link = link
        self._works = works
        self._runner = runner
        self._round = 0
        self._withdrawn = 0
        self._asked = 0
        self._ask_again = 0.0
        self._pause = LATE_SECONDS
        self._schedule: Schedule | None = None
        self._waits_since: float | None = None
        self._during_vote: DuringVote = lambda schedule, absent, since: False

    def begin(self, is_busy: bool) -> None:
        """Start the rounds, as the coordinator told all ranks; without a vote, do nothing.

        A rank that ``is_busy`` with something else declines the first round: other ranks may wait in it.
        """
        self.on = self._vote is not None
        if is_busy or self._round < self._withdrawn:
            self.decline()

    def next(self) -> Schedule | None:
        """The schedule to attempt now: that of exactly the tensors in flight, if a caller waits for one; or None."""
        return self._worker.schedule() if self.on else None

    def repeat(self, request: Request) -> Schedule | None:
        """The schedule of ``request`` alone, which a caller waits for and which was not submitted, or None.

        There is one only if this rank submitted the same request before, and has nothing in flight. If the schedule
        does not run, the request must be submitted.
        """
        return self._worker.repeat(request) if self.on else None

    def attempt(
        self, schedule: Schedule, during_vote: DuringVote, works: Sequence[Sequence[Work]] | None = None
    ) -> bool:
        """Run ``schedule`` if all ranks attempt it; if they do, complete its works. Return whether they do.

        ``works`` are those of its batches, if the caller has them. No destination is written before all ranks are known
        to run the schedule. If it does not run, this rank must :meth:`decline`. Errors of the backend propagate.
        """
        vote, number = self._vote, schedule.number
        works = works or self._works.find(schedule.batches)
        if works is None or vote is None or not self.on or number > LARGEST:  # an interrupt may have taken out a work
            return False
        first, runner, backend = self._worker.next_batch, self._runner, self._backend
        self._round += 1
        self._schedule, self._during_vote, self._waits_since = schedule, during_vote, None
        attempt = Attempt(first, schedule.batches, works, backend, runner, runner.begin_attempt(first, backend))
        try:
            self.on = vote.attempt(number, attempt.run, self._wait, attempt.agree)
        except BaseException:
            self._works.batch = first
            raise
        finally:
            self._schedule = None
        if self.on:
            self._worker.finish_schedule(schedule)
            bypassed = self._link.bypassed
            if bypassed is not None:
                bypassed[number] = schedule, bypassed.pop(number, (schedule, 0))[1] + 1
            if attempt.begun:
                attempt.follow()
        return self.on

    def _wait(self, absent: Sequence[int]) -> None:
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        is_wanted = self._schedule is not None and self._during_vote(self._schedule, absent, self._waits_since)
        if is_wanted or now > self._waits_since + LATE_SECONDS:
            self.ask_to_withdraw(self._round)

    def decline(self) -> None:
        """End the rounds, if they are on: this rank has a message for the coordinator."""
        if self._vote is not None and self.on:
            self._round += 1
            self._vote.decline()
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
        self._link.tell_all(Withdraw(round))

    def withdraw(self, message: Withdraw) -> None:
        """Decline a round, if this rank has not reached it: other ranks have waited in it for long.

        The request may come before :meth:`begin`, from a rank that has already run the same batch of empty tensors.
        """
        self._withdrawn = max(self._withdrawn, message.round)
        if self._round < self._withdrawn:
            self.decline()
        elif self._vote is not None:
            self._vote.hurry()
            if self._link.reaches_all and self._round == message.round:  # the one that has left may be a third rank
                self.ask_to_withdraw(message.round)
