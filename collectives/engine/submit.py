"""Where calls enter the engine."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.api import HOST, InvalidRequestError, Request
from collectives.controller.agreement import SET_CHANGES, check_member, checked
from collectives.controller.process_sets import GLOBAL, ProcessSets
from collectives.engine.runner import Runner
from collectives.engine.threads import CommandQueue
from collectives.engine.work import Work, fresh
from collectives.engine.work_table import WorkTable
from collectives.events import EventStream, Submitted

KEPT_CALLS = 1 << 12
"""The number of calls whose checked requests are kept."""


class Submitter:
    """Checks the calls of this rank and puts their works in flight. All methods are safe from any thread.

    ``queue`` wakes the thread that drives. While this rank is in a join on a process set, it submits nothing else
    there.
    """

    def __init__(
        self,
        rank: int,
        process_sets: ProcessSets,
        works: WorkTable,
        runner: Runner,
        events: EventStream,
        queue: CommandQueue,
    ) -> None:
        self._rank = rank
        self._process_sets = process_sets
        self._works = works
        self._runner = runner
        self._events = events
        self._queue = queue
        self._joins: dict[int, Work] = {}
        self._checked: dict[tuple[int, str], tuple[Request, Request]] = {}

    def repeats(self, work: Work) -> bool:
        """Whether ``work`` may enter without further checks, if this rank has submitted its request before.

        The request is then the checked one, if checks have changed it. A request that was submitted once stays right
        for the global set, whose members do not change; only a join forbids it.
        """
        if self._joins or Submitted in self._events.wanted:
            return False
        before = self._checked.get(work.request.key)
        if before is not None and before[0] is work.request:
            work.request = before[1]
        return True

    def _keep(self, request: Request, result: Request) -> None:
        if request.process_set != GLOBAL:  # the next set with this id may have other members
            return
        if len(self._checked) >= KEPT_CALLS:
            self._checked.clear()
        self._checked[request.key] = request, result

    def enter(self, works: Sequence[Work], unnamed: bool) -> None:
        """Put ``works`` in flight, all of them or none; raises the errors of :meth:`Engine.submit`."""
        try:
            members = [self.check(work.request) for work in works]
            try:
                for work, ranks in zip(works, members, strict=True):
                    request = checked(work.request, ranks)
                    if request is not work.request:
                        self._keep(work.request, request)
                        work.request = request
                    if request.device != HOST:
                        self._runner.check(request)
            except InvalidRequestError as error:
                self.reject(works, unnamed, error)
                raise
            self._works.enter(works, unnamed)
        except InvalidRequestError as error:
            error.reported = True
            raise
        if self.is_observed:
            self.announce(works)

    @property
    def is_observed(self) -> bool:
        """Whether anybody listens to :meth:`announce`."""
        return Submitted in self._events.wanted

    def announce(self, works: Sequence[Work]) -> None:
        """Tell observers that ``works`` were submitted."""
        for work in works:
            self._events.publish(_submitted(work.request, work.since))

    def report(self, requests: Sequence[Request], error: InvalidRequestError, unnamed: bool) -> None:
        try:
            for request in requests:
                self.check(request)
        except InvalidRequestError:
            return
        self.reject([Work(request, None, None) for request in requests], unnamed, error)

    def reject(self, works: Sequence[Work], unnamed: bool, error: Exception) -> None:
        """The call failed on this rank; members on which it did not must not wait for this rank."""
        for work in works:
            work.fail(fresh(error))  # a copy without traceback, which would keep the caller's tensors
        self._works.reject(works, unnamed)
        self._queue.notify()

    def check(self, request: Request) -> Sequence[int]:
        """The members of the set that ``request`` is for; InvalidRequestError where no member waits for this rank."""
        members = self._process_sets.ranks(request.process_set)
        check_member(request, self._rank, members)
        joined = self._joins.get(request.process_set)
        if joined is not None and joined.done:
            self._joins.pop(request.process_set, None)
        elif joined is not None and request.operation not in SET_CHANGES:
            raise self._too_late(request)
        return members

    def begin_join(self, work: Work) -> None:
        """This rank joins the set of ``work``; InvalidRequestError where another thread of it has joined before."""
        request = work.request
        self.check(request)
        if self._joins.setdefault(request.process_set, work) is not work:
            raise self._too_late(request)

    def end_join(self, process_set: int) -> None:
        """The join on ``process_set`` is over."""
        self._joins.pop(process_set, None)

    def _too_late(self, request: Request) -> InvalidRequestError:
        return InvalidRequestError(
            f"{request.operation.value} {request.name!r}: rank {self._rank} has joined process set "
            f"{request.process_set}; submit tensors before join() or after it has returned"
        )


def _submitted(request: Request, now: float) -> Submitted:
    kind, dtype = request.operation.value, request.dtype.label
    return Submitted(request.name, request.process_set, kind, dtype, request.shape, request.nbytes, now)
