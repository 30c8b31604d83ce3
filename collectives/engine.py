"""The engine of one rank: takes tensors, agrees with the other ranks, runs backends, completes the works.

Whoever holds ``_driver`` drives: it alone touches the worker, the coordinator, the channel's data and the backends.
That is the communication thread, or a caller that waits (two thread hand-overs cost more than a small allreduce).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from typing import TypeAlias

from collectives import api
from collectives.agreement import check_alone
from collectives.api import (
    DuplicateNameError,
    EngineError,
    HorovodInternalError,
    MismatchError,
    Operation,
    PeerLostError,
    Request,
    ShutDownError,
    Topology,
)
from collectives.backends.base import Backend
from collectives.buffers import Buffer
from collectives.control.base import Channel
from collectives.events import EventStream, Failed, Finished, Negotiated, Started, Submitted
from collectives.execution import execute
from collectives.latch import Latch
from collectives.messages import Abort, Leave, Left, Message, Refuse, Run, Stop, Unknown, decode, encode
from collectives.negotiation import Batch, Coordinator, Worker
from collectives.process_sets import GLOBAL, ProcessSets
from collectives.settings import Settings
from collectives.work import Destination, Work, fresh

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

COORDINATOR = 0
CYCLE_SECONDS = 0.001
PATIENT_SECONDS = 0.05
RECENT_SECONDS = 1.0
"""For so long after a caller drove, a patient communication thread expects one to come again."""
PARK_SECONDS = 0.002
SPINS = 50
VERDICT_SECONDS = 0.5
FLUSH_SECONDS = 0.1
UNNAMED = 256
WAIT_SLICE_SECONDS = 1.0

Command: TypeAlias = Callable[[], None]


class _Inside:
    """The threads inside of the user's calls: a signal handler there must not wait for other threads."""

    def __init__(self) -> None:
        self._threads: set[int] = set()

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.discard(threading.get_ident())

    def __contains__(self, thread: int) -> bool:
        return thread in self._threads


class Engine:
    """Collectives among the ranks of a job, submitted in any order, by name.

    ``backends`` has one backend for each process set this rank is a member of. The engine owns ``channel`` and
    ``backends`` and closes them. All public methods are safe from any thread. A ``patient`` engine has no core of its
    own: it moves nothing before a caller waits, or for tens of milliseconds, so early submissions gain nothing.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        process_sets: ProcessSets,
        channel: Channel,
        backends: Mapping[int, Backend],
    ) -> None:
        self.topology = topology
        self.process_sets = process_sets
        self.events = EventStream()
        self._channel = channel
        self._backends = dict(backends)
        self._timeouts = settings.timeouts
        self._worker = Worker(cache=settings.cache_capacity > 0)
        self._coordinator = _coordinator(topology, settings, process_sets) if topology.rank == COORDINATOR else None
        # Owned by the engine, held for a few instructions: guards the table of works and the queues of submissions.
        # Reentrant, because a signal handler may call shutdown() at any point of the main thread.
        self._lock = threading.RLock()
        self._works: dict[tuple[int, str], Work] = {}
        self._queued: dict[tuple[int, str], deque[Work]] = {}
        self._commands: deque[Command] = deque()
        self._batches: deque[Batch] = deque()
        self._batches_since = 0.0
        self._counters: dict[tuple[Operation, int], int] = {}
        # Owned by whoever drives; never waited for without a bound: callers wait for _changed instead.
        self._driver = threading.Lock()
        # Owned by the engine; waiting callers, woken when a work is done or the driver steps down; waits are sliced.
        self._changed = threading.Condition(threading.RLock())
        self._waiters: set[int] = set()
        # Owned by the communication thread, which parks here, for milliseconds, while a caller drives.
        self._unpark = Latch()
        self._inside = _Inside()
        self._polling: set[int] = set()
        self.patient = _is_patient(topology, settings)
        self._napping = False
        self._driven_at = 0.0
        self._caller = 0
        self._token = object()
        self._failure: Exception | None = None
        self._lost: int | None = None
        self._leaving = False
        self._leave_deadline: float | None = None
        self._finished = False
        channel.watch(self._on_lost)
        # Owned by the engine; sleeps in poll, ended by shutdown() or a failure, joined by shutdown().
        self._thread = threading.Thread(target=self._communicate, name=f"hvd-engine-{topology.rank}", daemon=True)
        self._thread.start()

    # Calls of the user, on any thread.

    def submit(self, request: Request, source: Buffer | None, destination: Destination, unnamed: bool = False) -> Work:
        """Put a tensor in flight and return its handle at once.

        ``source`` must not change and ``destination`` must not be read before the work is done. An ``unnamed`` request
        gets a name: the n-th of an operation on a process set has the same one on every member, and waits its turn
        while that name is in flight. Names repeat after a while, to profit from the response cache. Raises
        InvalidRequestError, DuplicateNameError or, when the engine has ended, the error that ended it.
        """
        with self._inside:
            work = self._enter(Work(request, source, destination), unnamed)
            if not self._napping:
                self._notify()
            return work

    def run(self, request: Request, source: Buffer | None, destination: Destination, unnamed: bool = False) -> Work:
        """Submit, wait and return the finished work; raises what :meth:`submit` and :meth:`synchronize` raise."""
        work = Work(request, source, destination)
        work.urged = True
        with self._inside:
            self._enter(work, unnamed)
            self._await(work)
        work.outcome()
        return work

    def poll(self, work: Work) -> bool:
        """Whether :meth:`synchronize` would return at once. Who asks waits: the tensor is not held back any more."""
        if not (work.done or work.urged):
            with self._inside:
                self._urge(work)
                self._notify()
        return work.done

    def synchronize(self, work: Work) -> Buffer | None:
        """Wait for ``work`` and return its output; raises MismatchError, PeerLostError and the like."""
        with self._inside:
            if not (work.done or work.urged):
                self._urge(work)
            self._await(work)
        return work.outcome()

    def _await(self, work: Work) -> None:
        if work.owner is not self._token and not work.done:
            raise ShutDownError(f"{work.request.name!r} was submitted before Horovod was shut down and started again")
        while not work.done:
            if self._driver.acquire(blocking=False):
                try:
                    self._drive_for(work)
                finally:
                    self._caller = 0
                    self._driver.release()  # inline: an interrupt at the door of a function of ours would skip it
                    self._after_driving()
            else:
                self._await_change(work)
        if self._batches:  # which the communication thread may have left to this caller
            self._notify()

    def barrier(self, process_set: int = GLOBAL) -> None:
        """Return when every member of the process set has called it."""
        self.run(Request("barrier", Operation.BARRIER, process_set=process_set), None, None, unnamed=True)

    def shutdown(self) -> None:
        """End the engine on all ranks: what was agreed on before still runs, the rest fails with ShutDownError.

        Waits for the other ranks' communication threads, at most the shutdown timeout. Idempotent. In a signal handler
        that interrupted a call of this thread it does not wait; a second call, later, does. If that call was driving,
        all ranks end at once.
        """
        me = threading.get_ident()
        if self._caller == me:
            self._fail(ShutDownError(f"Horovod has been shut down by rank {self.topology.rank}, in a signal handler"))
            return
        with self._lock:
            if not self._finished and self._failure is None:
                self._commands.append(self._leave)
        self._notify()
        if me in self._inside:
            return
        self._thread.join(self._timeouts.shutdown + self._timeouts.collective)
        if self._thread.is_alive():
            logger.error("rank %d: the communication thread does not end; it is abandoned", self.topology.rank)

    def abort(self, error: HorovodInternalError) -> None:
        """End the engine on all ranks at once; every pending and future work raises ``error``."""
        with self._lock:
            self._commands.append(lambda: self._fail(error))
        self._abort_backends(error)
        self._notify()

    @property
    def is_ending(self) -> bool:
        """Whether a :meth:`shutdown` did not wait for the communication thread, which is still busy with it."""
        return self._thread.is_alive()

    def disown(self) -> None:
        """In a forked child: close this copy of the connections, without a word; the parent keeps its own."""
        self._finished = True
        self._channel.disown()

    def _enter(self, work: Work, unnamed: bool) -> Work:
        request = work.request
        check_alone(request, self.topology.rank, self.process_sets.ranks(request.process_set))
        with self._lock:
            self._require_running()
            work.owner = self._token
            if unnamed:
                request = work.request = replace(request, name=self._next_name(request))
            if request.key not in self._works:
                self._works[request.key] = work
                self._commands.append(lambda: self._worker.submit(request, work.urged))
            elif unnamed:
                self._queued.setdefault(request.key, deque()).append(work)
            else:
                raise DuplicateNameError(
                    f"tensor {request.name!r} is still in flight on rank {self.topology.rank}; "
                    "synchronize it first, or give each tensor its own name"
                )
        if self.events.active:
            self.events.publish(Submitted(request.name, request.process_set, request.nbytes, time.monotonic()))
        return work

    def _next_name(self, request: Request) -> str:
        kind = (request.operation, request.process_set)
        number = self._counters.get(kind, 0)
        self._counters[kind] = number + 1
        return f"{request.name}.noname.{number % UNNAMED}"

    def _require_running(self) -> None:
        if self._finished or self._failure is not None:
            raise fresh(self._ending())

    # Waiting, and who drives.

    def _urge(self, work: Work) -> None:
        """Let nobody hold ``work`` back, nor those of its name that must run before it."""
        key = work.request.key
        with self._lock:
            work.urged = True
            if self._works.get(key) is not work:
                for earlier in self._ahead(work):
                    earlier.urged = True
            self._commands.append(lambda: self._worker.urge(key))

    def _ahead(self, work: Work) -> Iterator[Work]:
        key = work.request.key
        if key in self._works:
            yield self._works[key]
            yield from takewhile(lambda other: other is not work, self._queued.get(key, ()))

    def _drive_for(self, work: Work) -> None:
        spins = 0
        self._caller = threading.get_ident()
        while not (work.done or self._finished):
            if self._step_safely():
                spins = 0
            elif spins < SPINS:
                spins += 1
                os.sched_yield()  # the peer we wait for may be queued on this very core
            else:
                self._sleep()
        if self._finished:
            self._fail_works(self._ending())
        if not work.done:  # an interrupt took it out of the table
            work.fail(self._ending())

    def _ending(self) -> Exception:
        return self._failure or ShutDownError("Horovod has been shut down; call hvd.init() to start again")

    def _after_driving(self) -> None:
        self._driven_at = time.monotonic()
        held = self._coordinator is not None and self._coordinator.deadline is not None
        if self._commands or self._batches or held or self._channel.has_unsent:
            self._notify()
        self._announce()

    def _announce(self) -> None:
        if self._waiters:
            with self._changed:
                self._changed.notify_all()

    def _await_change(self, work: Work) -> None:
        if self._commands:
            self._notify()
        me = threading.get_ident()
        with self._changed:
            try:
                self._waiters.add(me)
                if not work.done and self._driver.locked():
                    self._changed.wait(WAIT_SLICE_SECONDS)
            finally:
                self._waiters.discard(me)

    def _notify(self) -> None:
        if self._polling:
            self._channel.wake()
        self._unpark.set()

    def _sleep(self) -> None:
        me = threading.get_ident()
        self._polling.add(me)
        try:
            if not self._commands and self._lost is None and not self._finished:
                self._channel.poll(self._until_deadline())
        finally:
            self._polling.discard(me)

    def _until_deadline(self) -> float | None:
        hold = self._coordinator.deadline if self._coordinator is not None else None
        run = self._batches_since + PATIENT_SECONDS if self._batches else None
        deadlines = [deadline for deadline in (hold, run, self._leave_deadline) if deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    # The communication thread.

    def _communicate(self) -> None:
        try:
            while not self._finished:
                self._unpark.clear()
                if self._driver.acquire(blocking=False):
                    self._drive()
                if not self._finished:
                    self._rest()
        finally:
            self._end()

    def _drive(self) -> None:
        try:
            while not self._finished and self._step_safely():
                pass
        finally:
            self._driver.release()
            self._announce()

    def _rest(self) -> None:
        """Sleep until there may be work; in a park of our own while callers drive, to stay out of their way."""
        idle = time.monotonic() - self._driven_at
        if self._driver.locked():
            if self._commands:  # the wake may have come to us instead of the caller that drives
                self._channel.wake()
            self._unpark.wait(PARK_SECONDS)
        elif idle < PARK_SECONDS:
            if not self._commands:
                self._unpark.wait(PARK_SECONDS)
        elif self.patient and (self._works or idle < RECENT_SECONDS):
            self._nap()
        else:
            self._sleep()

    def _nap(self) -> None:
        """Sleep through the submissions of a while: each wake would take the computation's core and the GIL."""
        me = threading.get_ident()
        self._polling.add(me)
        self._napping = True
        try:
            if not self._unpark.is_set():
                until = self._until_deadline()
                self._channel.poll(PATIENT_SECONDS if until is None else min(until, PATIENT_SECONDS))
        finally:
            self._napping = False
            self._polling.discard(me)

    def _end(self) -> None:
        self._finished = True
        with self._driver, ExitStack() as stack:
            for backend in self._backends.values():
                stack.callback(backend.close)
            stack.callback(self._channel.close)
            self._fail_works(self._ending())
        self._announce()

    # Steps; only for whoever drives.

    def _step_safely(self) -> bool:
        try:
            return self._step()
        except HorovodInternalError as error:
            self._fail(self._verdict(error))
        except Exception as error:
            logger.exception("rank %d: unexpected error in the engine", self.topology.rank)
            failure = EngineError(f"rank {self.topology.rank}: unexpected {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)
        except BaseException as error:
            self._fail(ShutDownError(f"rank {self.topology.rank} was interrupted by {type(error).__name__}"))
            raise
        return True

    def _step(self) -> bool:
        active = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        ready = self._worker.outgoing()
        if ready is not None:
            self._tell_coordinator(ready)
        lost = self._lost  # looked at first, because what the lost rank said last may explain more
        for sender, data in self._channel.receive():
            active = True
            self._hear(sender, decode(data))
        if self._coordinator is not None and not self._finished:
            self._coordinate(self._coordinator)
        if self._batches and not self._finished and self._may_run():
            active = True
            self._run_batches()
        if lost is not None and not self._finished:
            self._fail(self._loss(lost))
        if self._leave_deadline is not None and time.monotonic() > self._leave_deadline:
            logger.warning("rank %d: not every rank answered the shutdown in time", self.topology.rank)
            self._finished = True
        return active

    def _may_run(self) -> bool:
        """Whether to run now what was decided, or to leave it to the caller who will soon wait, or waits, for it.

        With no core to spare, a batch on the communication thread would take one from a rank that runs it, too.
        """
        if self._caller or not self.patient or time.monotonic() >= self._batches_since + PATIENT_SECONDS:
            return True
        keys = (response.request.key for batch in self._batches for response in batch.responses)
        return not self._waiters and any(self._works[key].urged for key in keys)

    def _tell_coordinator(self, message: Message) -> None:
        if self._coordinator is not None:
            self._coordinator.receive(COORDINATOR, message, time.monotonic())
        else:
            self._channel.send(COORDINATOR, encode(message))

    def _coordinate(self, coordinator: Coordinator) -> None:
        for outgoing in coordinator.decide(time.monotonic()):
            data = encode(outgoing.message) if len(outgoing.ranks) > 1 or outgoing.ranks[0] != COORDINATOR else b""
            for rank in outgoing.ranks:
                if rank != COORDINATOR:
                    self._channel.send(rank, data)
            if COORDINATOR in outgoing.ranks:
                self._obey(outgoing.message)

    def _hear(self, sender: int, message: Message) -> None:
        if isinstance(message, Abort):
            self._fail(_error(message))
        elif self._coordinator is not None:
            self._coordinator.receive(sender, message, time.monotonic())
        else:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        if isinstance(message, Run):
            if not self._batches:
                self._batches_since = time.monotonic()
            self._batches.extend(self._worker.run(message))
        elif isinstance(message, Refuse):
            refusal = self._worker.refuse(message)
            self._complete(self._take(refusal.key), MismatchError(refusal.text))
        elif isinstance(message, Unknown):
            self._worker.resend(message)
        elif isinstance(message, Stop):
            self._stop(message.rank)
        elif isinstance(message, Left):
            self._finished = True

    def _run_batches(self) -> None:
        """Run what was decided; first the peers must have heard of it, or they would not come.

        Only the coordinator waits for that: it has run everything older, so its peers are, or will be, reading. A
        worker that waited for a coordinator which is in a backend already would keep both waiting.
        """
        deadline = time.monotonic() + self._timeouts.collective
        while self._coordinator is not None and self._channel.has_unsent and self._lost is None and not self._finished:
            if time.monotonic() > deadline:
                break
            self._channel.flush(FLUSH_SECONDS)
        while self._batches and not self._finished:
            self._run_batch(self._batches.popleft())

    def _run_batch(self, batch: Batch) -> None:
        works = [self._take(response.request.key) for response in batch.responses]
        process_set = works[0].request.process_set
        backend = self._backends[process_set]
        try:
            if self.events.active:
                self._publish_start(works, backend)
            execute(works, batch.responses, self.process_sets.ranks(process_set), backend)
        except BaseException as error:
            self._put_back(works)
            raise error
        for work in works:
            self._complete(work, None)
        if self.events.active:
            names = tuple(work.request.name for work in works)
            self.events.publish(Finished(names, process_set, time.monotonic()))

    def _publish_start(self, works: Sequence[Work], backend: Backend) -> None:
        now = time.monotonic()
        request = works[0].request
        for work in works:
            self.events.publish(Negotiated(work.request.name, request.process_set, now))
        names = tuple(work.request.name for work in works)
        nbytes = sum(work.request.nbytes for work in works)
        self.events.publish(Started(names, request.process_set, request.operation.value, nbytes, backend.name, now))

    def _take(self, key: tuple[int, str]) -> Work:
        """Remove the work from the table; the next unnamed tensor of that name, if any, takes its place."""
        with self._lock:
            work = self._works.pop(key)
            queue = self._queued.get(key)
            if queue:
                following = self._works[key] = queue.popleft()
                self._commands.append(lambda: self._worker.submit(following.request, following.urged))
            return work

    def _put_back(self, works: Sequence[Work]) -> None:
        """Works of a batch that did not finish fail together with everything else."""
        with self._lock:
            for work in works:
                self._queued.setdefault(work.request.key, deque()).append(work)

    def _complete(self, work: Work, error: Exception | None) -> None:
        if error is None:
            work.finish()
        else:
            work.fail(error)
            self._publish_failure(work, error)
        self._announce()

    def _publish_failure(self, work: Work, error: Exception) -> None:
        if self.events.active:
            request = work.request
            self.events.publish(Failed(request.name, request.process_set, error, time.monotonic()))

    # Ends: polite, and not.

    def _leave(self) -> None:
        self._leave_deadline = time.monotonic() + self._timeouts.shutdown
        self._tell_coordinator(Leave())

    def _stop(self, rank: int) -> None:
        self._run_batches()
        self._fail_works(ShutDownError(f"Horovod has been shut down by rank {rank} while the tensor was in flight"))
        self._leaving = True
        self._tell_coordinator(Left())

    def _fail_works(self, error: Exception) -> None:
        with self._lock:
            works = [*self._works.values(), *(work for queue in self._queued.values() for work in queue)]
            self._works.clear()
            self._queued.clear()
        for work in works:
            if not work.done:
                work.fail(error)
                self._publish_failure(work, error)

    def _fail(self, error: HorovodInternalError) -> None:
        """End everything here with ``error`` and tell the others."""
        if self._finished:
            return
        with self._lock:
            self._failure = error
        self._abort_backends(error)
        data = encode(Abort(type(error).__name__, str(error)))
        for rank in range(1, self.topology.size) if self._coordinator is not None else (COORDINATOR,):
            self._channel.send(rank, data)
        self._fail_works(error)
        self._finished = True
        self._notify()
        self._announce()

    def _abort_backends(self, error: Exception) -> None:
        for backend in self._backends.values():
            backend.abort(error)

    def _on_lost(self, rank: int) -> None:
        """On the channel's watch thread: a connection ended."""
        if self._lost is None:
            self._lost = rank
        if not (self._leaving or self._finished):
            self._abort_backends(self._loss(rank))
        self._notify()
        self._channel.wake()

    def _loss(self, rank: int) -> PeerLostError:
        return PeerLostError(
            f"rank {rank} on host {self.topology.hosts[rank]!r} is gone: its process ended or its connection broke; "
            f"look at the output of that rank"
        )

    def _verdict(self, error: HorovodInternalError) -> HorovodInternalError:
        """The best explanation of ``error``: what another rank said, or whose connection ended; waits a moment."""
        deadline = time.monotonic() + VERDICT_SECONDS
        while not self._finished and time.monotonic() < deadline:
            lost = self._lost
            for _, data in self._channel.receive():
                message = decode(data)
                if isinstance(message, Abort):
                    return _error(message)
            if lost is not None:
                return self._loss(lost) if isinstance(error, PeerLostError) else error
            if not isinstance(error, PeerLostError | api.CollectiveTimeoutError):
                break
            self._channel.poll(0.05)
        return error


def _coordinator(topology: Topology, settings: Settings, process_sets: ProcessSets) -> Coordinator:
    patient = _is_patient(topology, settings)
    cycle_time = settings.cycle_time
    if cycle_time is None:
        cycle_time = PATIENT_SECONDS if patient else CYCLE_SECONDS
    return Coordinator(process_sets, settings.fusion_threshold, cycle_time, settings.cache_capacity, patient)


def _is_patient(topology: Topology, settings: Settings) -> bool:
    """Whether all ranks are on this host, leave no core to the communication threads, and nobody set a cycle time.

    Between hosts, data travels while nobody computes for it.
    """
    alone = topology.local_size >= topology.size
    return alone and settings.cycle_time is None and len(os.sched_getaffinity(0)) < 2 * topology.local_size


def _error(message: Abort) -> HorovodInternalError:
    """The error that another rank met, as the class it was there."""
    kind = getattr(api, message.kind, HorovodInternalError)
    error: HorovodInternalError = kind(message.text)
    return error
