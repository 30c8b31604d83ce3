"""Calls for a whole process set, and changes of the process sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from collectives.api import InvalidRequestError, Operation, Request
from collectives.engine.driver import Driver
from collectives.engine.exchange import Exchange
from collectives.engine.intake import Intake
from collectives.engine.registration import Form, Registration
from collectives.engine.work import Work
from collectives.engine.work_table import WorkTable
from collectives.planning.process_sets import ProcessSets

__all__ = ["ADD", "SetCalls"]

ADD = Request("process_set.add", Operation.ADD_PROCESS_SET)


class SetCalls:
    """The methods of an engine that concern a whole process set; :class:`Engine` describes them.

    ``dynamic``: process sets may be added. ``form`` makes the formation of one that has this rank as a member.
    """

    def __init__(
        self,
        rank: int,
        process_sets: ProcessSets,
        dynamic: bool,
        intake: Intake,
        works: WorkTable,
        exchange: Exchange,
        driver: Driver,
        form: Form,
    ) -> None:
        self._rank = rank
        self._process_sets = process_sets
        self._dynamic = dynamic
        self._intake = intake
        self._works = works
        self._exchange = exchange
        self._driver = driver
        self._form = form

    def barrier(self, process_set: int) -> None:
        """See :meth:`Engine.barrier`."""
        self._run(Work(Request("barrier", Operation.BARRIER, process_set=process_set), None, None))

    def join(self, process_set: int) -> int:
        """See :meth:`Engine.join`."""
        work = Work(Request("join", Operation.JOIN, process_set=process_set), None, None)
        work.urged = True
        with self._driver.inside:
            self._intake.begin_join(work)
            try:
                # The others must not believe that this rank has no data while some of it waits its turn.
                for earlier in self._works.queued(process_set):
                    self._exchange.urge(earlier)
                    self._driver.wait(earlier)
                self._works.enter([work], unnamed=True)
                if self._intake.is_observed:
                    self._intake.announce([work])
                self._driver.wait(work)
            finally:
                if work.done or not self._works.owns(work):  # or else an interrupt leaves this rank joined
                    self._intake.end_join(process_set)
        work.outcome()
        return work.answer

    def add(self, ranks: Sequence[int]) -> int:
        """See :meth:`Engine.add_process_set`."""
        work = Registration(ADD)
        try:
            with self._reporting(ADD):
                self._check_dynamic(ranks)
                members = self._process_sets.check(ranks)
                offer = self._prepare(work, members)
            work.request = replace(ADD, splits=members, offer=offer)
            return self._run(work).answer
        finally:
            if not self._works.owns(work):  # or else its end closes it, even if this call is interrupted
                work.close()

    def _prepare(self, work: Registration, members: Sequence[int]) -> bytes:
        """The addresses of this rank for the other members; ``work`` owns them, also if an interrupt comes."""
        if self._rank not in members:
            return b""
        work.formation = self._form(members)
        return work.formation.prepare()

    def _check_dynamic(self, ranks: Sequence[int]) -> None:
        if not self._dynamic:
            raise InvalidRequestError(
                f"process set {list(ranks)} cannot be added: HOROVOD_DYNAMIC_PROCESS_SETS is 0; unset it, or give the "
                "set to init(process_sets=[...])"
            )

    def remove(self, id: int) -> None:
        """See :meth:`Engine.remove_process_set`."""
        request = Request("process_set.remove", Operation.REMOVE_PROCESS_SET)
        with self._reporting(request):
            id, ranks = self._process_sets.check_removable(id)
            request = replace(request, root_rank=id, splits=ranks)
        self._run(Work(request, None, None))

    def _run(self, work: Work) -> Work:
        """Submit ``work``, which has no tensor and no name, wait, and return it."""
        work.urged = True
        with self._driver.inside:
            self._intake.enter([work], unnamed=True)
            self._driver.wait(work)
        work.outcome()
        return work

    @contextmanager
    def _reporting(self, request: Request) -> Iterator[None]:
        """An error before ``request`` is submitted, which has no name yet, ends it on the other ranks, too."""
        try:
            yield
        except Exception as error:
            self._intake.reject([Work(request, None, None)], True, error)
            raise
