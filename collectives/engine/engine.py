"""The engine of one rank, as its users see it: submit, poll, synchronize, change process sets, end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from collectives.api import (
    HorovodInternalError,
    InvalidRequestError,
    Operation,
    Parameters,
    PeerLostError,
    Request,
    ShutDownError,
    Topology,
)
from collectives.buffers import Buffer, Bytes
from collectives.controller.messages import COORDINATOR
from collectives.controller.process_sets import GLOBAL, ProcessSets
from collectives.engine.assembly import Assembly
from collectives.engine.counters import Counts
from collectives.engine.progress import ProgressEngine
from collectives.engine.registration import Form, Registration, SetBackends
from collectives.engine.shutdown import ProcessExit
from collectives.engine.submit import Submitter
from collectives.engine.threads import Callers
from collectives.engine.work import Destination, Watch, Work
from collectives.engine.work_table import WorkTable
from collectives.events import EventStream
from collectives.net.channel import Channel
from collectives.settings import Settings
from collectives.stalls.stragglers import Straggler

logger = logging.getLogger(__name__)


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
        submitter: Submitter,
        works: WorkTable,
        progress: ProgressEngine,
        callers: Callers,
        form: Form,
    ) -> None:
        self._rank = rank
        self._process_sets = process_sets
        self._dynamic = dynamic
        self._submitter = submitter
        self._works = works
        self._progress = progress
        self._callers = callers
        self._form = form

    def barrier(self, process_set: int) -> None:
        self._run(Work(Request("barrier", Operation.BARRIER, process_set=process_set), None, None))

    def join(self, process_set: int) -> int:
        work = Work(Request("join", Operation.JOIN, process_set=process_set), None, None)
        work.urged = True
        with self._callers:
            self._submitter.begin_join(work)
            try:
                # The others must not believe that this rank has no data while some of it waits its turn.
                for earlier in self._works.queued(process_set):
                    self._works.urge(earlier)
                    self._progress.wait(earlier)
                self._works.enter([work], unnamed=True)
                if self._submitter.is_observed:
                    self._submitter.announce([work])
                self._progress.wait(work)
            finally:
                if work.done or not self._works.owns(work):  # or else an interrupt leaves this rank joined
                    self._submitter.end_join(process_set)
        work.outcome()
        return work.answer

    def add(self, ranks: Sequence[int]) -> int:
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
        request = Request("process_set.remove", Operation.REMOVE_PROCESS_SET)
        with self._reporting(request):
            id, ranks = self._process_sets.check_removable(id)
            request = replace(request, root_rank=id, splits=ranks)
        self._run(Work(request, None, None))

    def _run(self, work: Work) -> Work:
        """Submit ``work``, which has no tensor and no name, wait, and return it."""
        work.urged = True
        with self._callers:
            self._submitter.enter([work], unnamed=True)
            self._progress.wait(work)
        work.outcome()
        return work

    @contextmanager
    def _reporting(self, request: Request) -> Iterator[None]:
        """An error before ``request`` is submitted, which has no name yet, ends it on the other ranks, too."""
        try:
            yield
        except Exception as error:
            self._submitter.reject([Work(request, None, None)], True, error)
            raise


class Engine:
    """Collectives among the ranks of a job, submitted in any order, by name.

    ``backends`` has those of each process set this rank is a member of; ``form`` begins those of sets that are added.
    The engine owns ``channel`` and all backends and closes them. All public methods are safe from any thread. A
    ``patient`` engine has no core of its own: it moves no data until a caller waits, or for tens of milliseconds, so
    early submissions bring no gain.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        process_sets: ProcessSets,
        channel: Channel,
        backends: Mapping[int, SetBackends],
        form: Form,
    ) -> None:
        self.topology = topology
        self.process_sets = process_sets
        self.events = EventStream()
        self._timeouts = settings.timeouts
        parts = Assembly(topology, settings, process_sets, channel, backends, self.events)
        self._works, self._loop, self._ends, self._progress = parts.works, parts.loop, parts.ends, parts.progress
        self._queue, self._callers = parts.queue, parts.callers
        self._submitter = Submitter(topology.rank, process_sets, parts.works, parts.runner, self.events, parts.queue)
        self._set_calls = SetCalls(
            topology.rank,
            process_sets,
            settings.dynamic_process_sets,
            self._submitter,
            parts.works,
            parts.progress,
            parts.callers,
            form,
        )
        self._parts = parts
        parts.start()

    def on_death(self, call: Callable[[PeerLostError], None]) -> None:
        """Call ``call`` when it is certain that another rank's process has ended, before its callers hear of it.

        It runs on a thread of the engine and must not wait.
        """
        self._ends.on_death = call

    @property
    def patient(self) -> bool:
        """Whether early submissions bring no gain."""
        return self._progress.patient

    @property
    def parameters(self) -> Parameters:
        """The parameters of the last batch on this rank; before the first batch, those of its own settings."""
        return self._loop.parameters

    @property
    def batches(self) -> int:
        """The number of batches that this rank knows of, those of sets to which it does not belong included."""
        return self._loop.batches

    @property
    def last_batch(self) -> int | None:
        """The number of the last batch that has ended on this rank; None before the first one."""
        return self._parts.counters.batch

    def counts(self) -> Counts:
        """The work of this rank up to now, in numbers."""
        parts = self._parts
        sets = parts.counters.counts(parts.worker.introduced.__getitem__)
        return Counts(sets, parts.link.sent, parts.link.received)

    def waiting(self) -> float:
        """How long callers of this rank have waited since its last batch was over, in seconds; 0 if none waits."""
        since = [work.since for work in self._works.urged()]
        return max(0.0, time.monotonic() - max(self._parts.counters.ended, min(since))) if since else 0.0

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """On rank 0: the ranks that others wait for now, again and again. Empty on other ranks."""
        return self._parts.stragglers.stragglers

    @property
    def cut_off_since(self) -> float | None:
        """When the oldest operation that the end of this engine has cut off was submitted, in monotonic seconds."""
        return self._works.cut_off_since

    def propose(self, **changes: Any) -> None:
        """On rank 0: let ``changes`` to the parameters hold on all ranks, from the next batch that is decided on.

        Each rank switches before that batch runs there; its :attr:`parameters` then have a new version. Parameters that
        are not named stay as the latest call for them left them. Raises InvalidRequestError for values out of range,
        and on other ranks.
        """
        if self.topology.rank != COORDINATOR:
            raise InvalidRequestError(f"rank {self.topology.rank} cannot change parameters; propose them on rank 0")
        replace(self.parameters, **changes)  # raises here and not on the thread that drives
        self._loop.propose(changes)
        self._queue.notify()

    def share(self, rows: Sequence[Bytes], key: bytes, process_set: int = GLOBAL) -> object | None:
        """Let allreduces combine tensors in place that lie in ``rows[position]``, memory of all members.

        It holds as long as the caller keeps the result, which is None where it brings no gain. When the engine has
        ended with an error, other ranks may still write into these rows. See :meth:`Backend.share` for the arguments.
        """
        return self._parts.runner.share(process_set, rows, key)

    # Tensors.

    def submit(self, request: Request, source: Buffer | None, destination: Destination, unnamed: bool = False) -> Work:
        """Put a tensor in flight and return its handle at once.

        ``source`` must not change and ``destination`` must not be read before the work is done. An ``unnamed`` request
        gets a name: the n-th of an operation on a process set has the same one on every member, and waits its turn
        while that name is in flight. Names repeat after a while, to profit from the response cache. Raises
        InvalidRequestError, DuplicateNameError or, when the engine has ended, the error that ended it.
        """
        work = Work(request, source, destination)
        self.submit_group([work], unnamed)
        return work

    def submit_group(self, works: Sequence[Work], unnamed: bool = False) -> None:
        """Put ``works`` in flight, all of them or none. Several must have one group, and run or fail together.

        An ``unnamed`` group gets a name as unnamed tensors do. Raises the errors of :meth:`submit`.
        """
        with self._callers:
            self._submitter.enter(works, unnamed)
            if not self._progress.napping:
                self._queue.notify()

    def run(self, request: Request, source: Buffer | None, destination: Destination, unnamed: bool = False) -> Work:
        """Submit, wait and return the finished work; raises the errors of :meth:`submit` and :meth:`synchronize`."""
        work = Work(request, source, destination)
        work.urged = True
        with self._callers:
            entered = not unnamed and self._submitter.repeats(work) and self._progress.run_now(work)
            if not entered:
                self._submitter.enter([work], unnamed)
            if not (entered and work.done):
                self._progress.wait(work)
        work.outcome()
        return work

    def poll(self, work: Work) -> bool:
        """Whether :meth:`synchronize` would return at once. A poll ends any hold on the tensor, as a wait does."""
        if not (work.done or work.urged):
            with self._callers:
                self._works.urge(work)
                self._queue.notify()
        return work.done

    def synchronize(self, work: Work) -> Buffer | None:
        """Wait for ``work`` and return its output; raises MismatchError, PeerLostError and the like."""
        with self._callers:
            if not (work.done or self._works.owns(work)):
                name = work.request.name
                raise ShutDownError(f"{name!r} was submitted before Horovod was shut down and started again")
            if not (work.done or work.urged):
                self._works.urge(work)
            self._progress.wait(work)
        return work.outcome()

    def await_any(self, watch: Watch) -> None:
        """Wait until ``watch`` is done. A wait ends any hold on all works that it stands for, which are of this engine.

        Raises no error of a work: see :meth:`Work.outcome`.
        """
        with self._callers:
            for work in watch.works:
                if not (work.done or work.urged):
                    self._works.urge(work)
            self._progress.wait(watch)

    def abandon(self, works: Sequence[Work]) -> None:
        """This rank does not want ``works`` of one call any more: each ends soon, though others may never submit it.

        It fails here, unless all ranks have submitted it: then it runs. The others wait for this rank as before, which
        may submit a tensor of that name again. A group is abandoned as a whole. Works without a name are not abandoned,
        because the ranks count these.
        """
        self._loop.abandon(works)
        self._queue.notify()

    def rouse(self) -> None:
        """Let all callers that wait look again at what they wait for: a :class:`Watch` may have been interrupted."""
        self._loop.rouse()
        self._queue.notify()
        self._parts.waiters.announce()

    def reject(self, requests: Sequence[Request], error: InvalidRequestError, unnamed: bool = False) -> None:
        """Report a call of ``requests`` that ended with ``error`` on this rank before it was submitted.

        Members that make the call get a RefusedCallError. ``unnamed`` requests get names, as if they were submitted.
        Does nothing if no member can wait for this rank.
        """
        with self._callers:
            self._submitter.report(requests, error, unnamed)

    # Calls for a whole process set.

    def barrier(self, process_set: int = GLOBAL) -> None:
        """Return when every member of the process set has called it, or has joined."""
        self._set_calls.barrier(process_set)

    def join(self, process_set: int = GLOBAL) -> int:
        """Take part in the others' collectives, without data, until all have joined; returns the last rank to join.

        A rank that has joined brings zeros to sums and averages, no rows to allgather and alltoall, and the neutral
        value to MIN, MAX and PRODUCT; a broadcast must not come from it.
        """
        return self._set_calls.join(process_set)

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a process set and return its id; all ranks of the job call it with the same ``ranks``.

        InvalidRequestError for ranks that cannot make a set or have one already, and where HOROVOD_DYNAMIC_PROCESS_SETS
        is 0; MismatchError when the ranks disagree.
        """
        return self._set_calls.add(ranks)

    def reject_process_set(self, error: InvalidRequestError) -> None:
        """Report that :meth:`add_process_set` could not be called, because the ranks can make no list of integers."""
        self.reject([ADD], error, unnamed=True)

    def remove_process_set(self, id: int) -> None:
        """Unregister a process set; all ranks of the job call it. Tensors in flight on the set fail.

        InvalidRequestError for the global set and for an unknown id, MismatchError when the ranks disagree.
        """
        self._set_calls.remove(id)

    # Ends.

    def shutdown(self, cause: str = "") -> None:
        """End the engine on all ranks: batches agreed on before still run, the rest fails with ShutDownError.

        The ``cause``, such as "raised ValueError", is told there.

        Waits for the other ranks' communication threads, at most the shutdown timeout. Idempotent. In a signal handler
        that interrupted a call of this thread it does not wait; a second call, later, does. If that call was driving,
        all ranks end at once.
        """
        if self._begin_end(cause):
            self._await(self._progress.join)

    def step_out(self) -> None:
        """Like :meth:`shutdown`, for a process that goes on to its next world.

        Where that disturbs nothing, its connections and memory are closed meanwhile: see :attr:`is_ending`.
        """
        if self._begin_end(""):
            self._await(self._progress.await_end if self._parts.runner.closes_aside else self._progress.join)

    def _begin_end(self, cause: str) -> bool:
        """Return whether to wait for the end."""
        me = threading.get_ident()
        if self._progress.is_driven_by(me):
            text = f"Horovod has been shut down by rank {self.topology.rank}, in a signal handler"
            self._ends.fail(ShutDownError(text))
            self._queue.notify()
            return False
        if not self._ends.ending.finished:
            self._ends.leave(cause)
        self._queue.notify()
        return me not in self._callers

    def _await(self, end: Callable[[float], bool]) -> None:
        if not end(self._timeouts.shutdown + self._timeouts.collective):
            logger.error("rank %d: the communication thread does not end; it is abandoned", self.topology.rank)

    def shut_down_at_exit(self, exit: ProcessExit, cause: str = "") -> None:
        """Like :meth:`shutdown`, while the process ends: daemon threads do not return from their calls."""
        self._callers.hold = exit.hold
        self.shutdown(cause)
        exit.settle(self._callers.ever())

    def abort(self, error: HorovodInternalError) -> None:
        """End the engine on all ranks at once; every pending and future work raises ``error``."""
        self._ends.abort(error)
        self._queue.notify()

    @property
    def has_ended(self) -> bool:
        """Whether every operation from now on raises the reason that has ended this engine."""
        return self._works.has_ended

    @property
    def is_ending(self) -> bool:
        """Whether the communication thread is still busy with an end for which :meth:`shutdown` did not wait."""
        return self._progress.is_running

    def disown(self) -> None:
        """In a forked child: close this copy of the connections, silently; the parent keeps its own. Takes no lock."""
        self._ends.disown()
