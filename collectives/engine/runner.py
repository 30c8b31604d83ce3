"""Runs the batches that were decided: each is one operation of a backend, or a change of the process sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from collectives.api import HOST, EngineError, MismatchError, Operation, Parameters, Request
from collectives.backends.base import Backend, OnWait, ignore_waits
from collectives.backends.completion import DONE, Completion
from collectives.backends.phases import PROFILER
from collectives.buffers import Buffer, Bytes
from collectives.controller.messages import Response
from collectives.controller.process_sets import ProcessSets
from collectives.controller.worker import Batch, Refusal
from collectives.engine.counters import Counters
from collectives.engine.observers import AttemptReporter, Reporter
from collectives.engine.registration import Formation, Registration, SetBackends
from collectives.engine.threads import CommandKind, CommandQueue, Waiters
from collectives.engine.work import Work, execute, joined_input
from collectives.engine.work_table import WorkTable
from collectives.events import Decided, EventStream, Failed, Finished, Phase, Started, Switched

POLL_SECONDS = 0.0002
"""The interval between checks of an operation whose device cannot tell when it is over."""
RELEASE_SECONDS = 0.005
"""The interval where no caller waits for that: then memory is released, and errors are found."""
OF_BATCHES = frozenset([Decided, Started, Phase, Finished])
ABORT_SECONDS = 0.1
"""The time that the operations in flight have to end after an abort."""


class _Flight(NamedTuple):
    """An operation that has begun, and its works. It holds their ``memory``, also when they are done.

    ``poll`` is the interval between checks, in seconds; None where the device tells when it is over.
    """

    completion: Completion
    works: Sequence[Work]
    batch: int
    backend: Backend
    memory: Sequence[object]
    poll: float | None


class Runner:
    """Owns the backends of all process sets that this rank is a member of, and the works of operations that have begun.

    ``flights`` are the operations that have begun and whose works are not done. ``counters`` count what they do.
    ``parameters`` are those of the last batch that ran; before, those of this rank. ``queue`` hears from the threads of
    devices, and ``waiters`` of works that are done.

    :meth:`abort`, :meth:`check` and :meth:`share` may be called from any thread, everything else from the thread that
    drives.
    """

    def __init__(
        self,
        rank: int,
        process_sets: ProcessSets,
        backends: Mapping[int, SetBackends],
        works: WorkTable,
        events: EventStream,
        counters: Counters,
        waiters: Waiters,
        queue: CommandQueue,
        parameters: Parameters,
    ) -> None:
        self._rank = rank
        self._sets = process_sets
        self._backends = dict(backends)
        self.flights: list[_Flight] = []
        self._works = works
        self._events = events
        self._reporter = Reporter(events)
        self._counters = counters
        self._waiters = waiters
        self._queue = queue
        self.parameters = parameters
        self._in_use: list[object] = []
        self._is_switched = False
        self._aborted: Exception | None = None
        self._on_wait: OnWait = ignore_waits

    def attend(self, on_wait: OnWait) -> None:
        """Call ``on_wait`` while an operation, or the connection of a new process set, waits for another rank for long.

        On any thread; where it waits on several, on each of them.
        """
        self._on_wait = on_wait
        for backend in self.backends():
            backend.attend(on_wait)

    def check(self, request: Request) -> None:
        """Raise UnsupportedRequestError for a tensor on a device that has no backend."""
        backends = self._backends.get(request.process_set)
        if backends is not None:
            backends.backend(request)

    def share(self, process_set: int, rows: Sequence[Bytes], key: bytes) -> object | None:
        """Let the backend for host memory use ``rows``, see :meth:`Backend.share`. Any thread."""
        backends = self._backends.get(process_set)
        host = backends and backends.by_device.get(HOST)
        return host.share(rows, key) if host else None

    def run(self, batch: Batch) -> None:
        """Run the batch; its works are done now, or when :meth:`settle` finds its operation over.

        Errors of the backend propagate.
        """
        if batch.parameters is not self.parameters or not self._is_switched:
            self._switch(batch.parameters, batch.id)
        request = batch.responses[0].request
        change = _CHANGES.get(request.operation)
        if change is not None:
            self._counters.drop(batch.id)
            change(self, batch.responses[0])
        else:
            self._exchange(batch, request.process_set)

    def _switch(self, parameters: Parameters, batch: int) -> None:
        self.parameters, self._is_switched = parameters, True
        for backend in self.backends():
            backend.adopt(parameters)
        if Switched in self._events.wanted:
            self._reporter.switched(batch, parameters)

    @property
    def _is_watched(self) -> bool:
        wanted = self._events.wanted
        return bool(wanted and not OF_BATCHES.isdisjoint(wanted)) or PROFILER.is_recording()

    @property
    def _version(self) -> int:
        return self.parameters.version if self._is_switched else 0

    def _exchange(self, batch: Batch, process_set: int) -> None:
        backend = self._backends[process_set].backend(batch.responses[0].request)
        works = self._works.running = [self._take(response, backend) for response in batch.responses]
        self._works.batch = batch.id
        try:
            if self._is_watched:
                self._reporter.started(batch.id, works, backend, self._version)
            elif backend.on_phase is not None:
                self._reporter.rest(backend)
            if backend.device != HOST:
                _await_memory(works, backend)
            self._counters.begin(batch.id, works, backend)
            completion = execute(works, batch.responses, backend)
        except BaseException:
            self._works.running = ()
            self._works.put_back(works)
            raise
        self._works.running, self._works.batch = (), None
        self._follow(completion, works, batch.id, backend)

    def _follow(self, completion: Completion, works: Sequence[Work], batch: int, backend: Backend) -> None:
        if completion is DONE:
            self._complete_all(works, batch, backend)
        else:
            self._counters.keep(batch)
            memory = [(work.source, work.output) for work in works]
            poll = RELEASE_SECONDS if backend.settles_early else self._poll(completion)
            self.flights.append(_Flight(completion, works, batch, backend, memory, poll))
            if backend.settles_early:
                self._settle_early(works, completion)

    def _poll(self, completion: Completion) -> float | None:
        return None if completion.notify(self._over) else POLL_SECONDS

    def _over(self) -> None:
        """On a thread of a device: an operation is over."""
        self._queue.put(CommandKind.SETTLE)
        self._queue.notify()

    def _settle_early(self, works: Sequence[Work], completion: Completion) -> None:
        """Callers go on; their streams wait for ``completion``."""
        for work in works:
            work.end = completion
            work.finish()
        self._waiters.announce()

    @property
    def deadline(self) -> float | None:
        """When :meth:`settle` should be called again, in monotonic seconds; None: never."""
        polls = [flight.poll for flight in self.flights if flight.poll is not None]
        return time.monotonic() + min(polls) if polls else None

    def settle(self) -> bool:
        """Complete the works of operations that are over, in any order; return whether there were any.

        Raises the error of an operation that failed.
        """
        over = False
        for flight in list(self.flights):
            if flight.completion.is_done:
                self._land(flight)
                over = True
        return over

    def drain(self, seconds: float) -> None:
        """Complete the works of all operations that have begun, which may take ``seconds``; raises as :meth:`settle`.

        Operations that are not over by then stay in flight.
        """
        deadline = time.monotonic() + seconds
        for flight in list(self.flights):
            if flight.completion.wait(max(0.0, deadline - time.monotonic())):
                self._land(flight)

    def _land(self, flight: _Flight) -> None:
        self.flights.remove(flight)
        self._complete_all(flight.works, flight.batch, flight.backend)

    def begin_attempt(self, first: int, backend: Backend) -> AttemptReporter | None:
        """Batches from the number ``first`` on begin, if all ranks attempt them; returns the reporter for observers."""
        self._counters.begin_attempt()
        if (self._events.wanted or PROFILER.is_recording()) and self._is_watched:
            return AttemptReporter(self._reporter, first, backend, self._version)
        if backend.on_phase is not None:
            self._reporter.rest(backend)
        return None

    def follow_attempt(self, completion: Completion, works: Sequence[Work], batch: int, backend: Backend) -> None:
        """All ranks run ``batch``, which has begun."""
        self._works.remove(works)
        self._follow(completion, works, batch, backend)

    def _complete_all(self, works: Sequence[Work], batch: int, backend: Backend) -> None:
        for work in works:
            if not work.done:
                work.finish()
        self._waiters.announce()
        self._counters.end(batch, works, backend, self.parameters)
        if self._events.wanted or backend.on_phase is not None:
            self._reporter.finished(batch, works)

    def _take(self, response: Response, backend: Backend) -> Work:
        return self._works.take(response.request.key) or joined_input(response, backend.group.size, backend.memory)

    def announce(self, batches: Sequence[Batch]) -> None:
        """Tell observers that ``batches`` will run."""
        self._counters.decided(batches)
        if Decided in self._events.wanted:
            self._reporter.decided(batches)

    def complete(self, work: Work, error: Exception | None = None) -> None:
        """``work`` is done, or has failed."""
        if error is None:
            work.finish()
        else:
            self.fail(work, error)
        self._waiters.announce()

    def refuse(self, refusal: Refusal) -> None:
        """The ranks disagree about a tensor: only this tensor fails."""
        work = self._works.take(refusal.key)
        if work is not None and not work.done:  # a call that has failed here earlier is over
            self.complete(work, refusal.error)

    def fail(self, work: Work, error: Exception) -> None:
        """``work`` ends with ``error``; waiting callers are not woken yet."""
        work.fail(error)
        self._counters.failed(work.request.process_set)
        if Failed in self._events.wanted:
            self._reporter.failed(work, error)

    # Changes of the process sets, and the end of a join.

    def _answer(self, response: Response, answer: int) -> None:
        work = self._works.take(response.request.key)
        if work is not None:
            work.answer = answer
            self.complete(work)

    def _end_join(self, response: Response) -> None:
        # The members have submitted different numbers of unnamed tensors.
        self._works.restart_names(response.request.process_set)
        self._answer(response, response.sizes[0])

    def _add_set(self, response: Response) -> None:
        ranks, wanted = response.request.splits, response.sizes[0]
        id = self._sets.add(ranks)
        if id != wanted:
            raise EngineError(f"process set {list(ranks)} got the id {id} here, and {wanted} on rank 0")
        if self._rank in ranks:
            formation = self._formation(response)
            backends = self._backends[id] = formation.connect(response.offers, self._check_connecting)
            for backend in backends.by_device.values():
                backend.attend(self._on_wait)
                if self._is_switched:
                    backend.adopt(self.parameters)
            self._check()  # because an abort by another thread meanwhile missed this backend
        self._answer(response, id)

    def _check_connecting(self) -> None:
        self._on_wait()
        self._check()

    def _formation(self, response: Response) -> Formation:
        for work in chain.from_iterable(self._works.find([(response,)]) or ()):
            if isinstance(work, Registration) and work.formation is not None:
                return work.formation
        raise EngineError(f"rank {self._rank} has not prepared for process set {list(response.request.splits)}")

    def _check(self) -> None:
        if self._aborted is not None:
            raise self._aborted

    def _remove_set(self, response: Response) -> None:
        id = response.request.root_rank
        self._sets.remove(id)
        self._works.restart_names(id)
        for work in self._works.take_set(id):
            self.complete(work, MismatchError(f"process set {id} was removed while the tensor was in flight"))
        backends = self._backends.get(id)
        if backends is not None:
            for backend in backends.by_device.values():
                backend.close()  # waits for the operations in flight, which an abort must reach
            del self._backends[id]
            self.settle()
        self._answer(response, id)

    # Ends.

    def abort(self, error: Exception) -> None:
        """Make every call of a backend raise ``error``."""
        self._aborted = error
        for backend in self.backends():
            backend.abort(error)

    def fail_flights(self, error: Exception) -> None:
        """The works of operations that are not over end with ``error``, after an abort."""
        flights, self.flights = self.flights, []
        deadline = time.monotonic() + ABORT_SECONDS
        for flight in flights:
            if not _is_over(flight.completion, deadline):  # the device may use the memory as long as it exists
                self._in_use += flight.memory
            for work in flight.works:
                if not work.done:
                    self.fail(work, error)

    @property
    def closes_aside(self) -> bool:
        """Whether this process may connect in its next world while its backends close."""
        return all(backend.closes_aside or backend.absence for backend in self.backends())

    def backends(self) -> list[Backend]:
        """All backends, to be closed."""
        return [backend for each in list(self._backends.values()) for backend in each.by_device.values()]


def _await_memory(works: Sequence[Work], backend: Backend) -> None:
    for work in works:
        for buffer in (work.source, work.destination):
            if isinstance(buffer, Buffer) and buffer.ready is not None:
                backend.begin_after(buffer.ready)


def _is_over(completion: Completion, deadline: float) -> bool:
    try:
        return completion.wait(max(0.0, deadline - time.monotonic()))
    except Exception:  # noqa: BLE001 - a failed operation is over, too
        return True


_CHANGES: dict[Operation, Callable[[Runner, Response], None]] = {
    Operation.JOIN: Runner._end_join,
    Operation.ADD_PROCESS_SET: Runner._add_set,
    Operation.REMOVE_PROCESS_SET: Runner._remove_set,
}
