"""One rank's part in the protocol: hears and speaks through the channel, runs what was decided, and ends in one way.

Nothing here waits for another rank but the backends. What is not said to be for any thread is for whoever drives.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    Request,
    ShutDownError,
    Timeouts,
    Topology,
)
from collectives.control.base import Channel
from collectives.engine.runner import Runner
from collectives.engine.unison import Unison
from collectives.engine.work import Work
from collectives.engine.work_table import WorkTable
from collectives.parameters import Parameters
from collectives.planning.coordinator import Coordinator
from collectives.planning.errors import pack, unpack
from collectives.planning.messages import (
    Abort,
    Leave,
    Left,
    Message,
    Refuse,
    Response,
    Run,
    Stop,
    Unknown,
    Withdraw,
    decode,
    encode,
)
from collectives.planning.stalls import StallInspector, Waiting
from collectives.planning.worker import Batch, Worker

__all__ = ["COORDINATOR", "Exchange"]

logger = logging.getLogger(__name__)

COORDINATOR = 0
VERDICT_SECONDS = 0.5
FLUSH_SECONDS = 0.1
UNISON_SECONDS = 0.25
"""So long a rank waits in unison; then the ranks that have not come decline."""

Command: TypeAlias = Callable[[], None]


class Exchange:
    """Owns the channel, the worker and, on rank 0, the coordinator.

    ``commands`` are what other threads want to have done, in order. ``finished`` turns true once, when there is nothing
    more to do but to close; ``failure`` then tells why, None for a polite end. ``announce`` wakes who waits for a work.
    ``parameters`` are those of the last batch that ran.
    """

    def __init__(
        self,
        topology: Topology,
        timeouts: Timeouts,
        channel: Channel,
        coordinator: Coordinator | None,
        worker: Worker,
        unison: Unison,
        works: WorkTable,
        runner: Runner,
        announce: Callable[[], None],
        parameters: Parameters,
        stalls: StallInspector | None = None,
    ) -> None:
        self.channel = channel
        self.commands: deque[Command] = deque()
        self.finished = False
        self.failure: Exception | None = None
        self.parameters = parameters
        self._topology = topology
        self._timeouts = timeouts
        self._coordinator = coordinator
        self._worker = worker
        self._unison = unison
        self._works = works
        self._runner = runner
        self._announce = announce
        self._stalls = stalls
        self._inspect_at: float | None = None
        self._batches: deque[Batch] = deque()
        self._batches_since = 0.0
        self._alone_since = 0.0
        self._withdrawn = False
        self._lost: int | None = None
        self._leaving = False
        self._leave_asked: float | None = None
        self._leave_deadline: float | None = None

    @property
    def deadline(self) -> float | None:
        """When :meth:`step` must be called again, in monotonic seconds, though nothing arrives; None: never."""
        hold = self._coordinator.deadline if self._coordinator is not None else None
        run = self._batches_since + self.parameters.patience if self._batches else None
        times = (hold, run, self._inspect_at, self._leave_deadline)
        deadlines = [deadline for deadline in times if deadline is not None]
        return min(deadlines) if deadlines else None

    @property
    def is_quiet(self) -> bool:
        """Whether only a message, or what another thread does, gives :meth:`step` something to do."""
        held = self._coordinator is not None and self._coordinator.deadline is not None
        return not (self.commands or self._batches or held or self.channel.has_unsent)

    @property
    def has_batches(self) -> bool:
        """Whether something was decided that has not run yet."""
        return bool(self._batches)

    @property
    def has_works(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._works)

    @property
    def may_sleep(self) -> bool:
        """Whether nothing came up that a wait in the channel would miss."""
        return not self.commands and self._lost is None and not self.finished

    def submit(self, works: Sequence[Work]) -> None:
        """Let ``works`` be negotiated, with the next step; from any thread."""
        self.commands.append(partial(self._submit, works))

    def _submit(self, works: Sequence[Work]) -> None:
        for work in works:
            self._worker.submit(work.request, work.urged)

    def urge(self, work: Work) -> None:
        """Let nobody hold ``work`` back; from any thread."""
        self._works.urge(work)
        self.commands.append(lambda: self._worker.urge(work.request.key))

    def propose(self, parameters: Parameters) -> None:
        """On the coordinator: let ``parameters`` hold from the next batch on; from any thread."""
        self.commands.append(partial(self._propose, parameters))

    def _propose(self, parameters: Parameters) -> None:
        self._unison.decline()  # ranks in unison hear of no batch
        if self._coordinator is not None:
            self._coordinator.propose(parameters)

    def step(self, eager: bool, waited: bool) -> bool:
        """Do what there is to do; whether there was something.

        Not ``eager``, decided batches are left to the callers who will soon wait, or wait (``waited``), for them: with
        no core to spare, a batch on the communication thread would take one from a rank that runs it, too.
        """
        try:
            return self._step(eager, waited)
        except HorovodInternalError as error:
            self.fail(self._verdict(error))
        except Exception as error:
            logger.exception("rank %d: unexpected error in the engine", self._topology.rank)
            failure = EngineError(f"rank {self._topology.rank}: unexpected {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)
        except BaseException as error:
            self.fail(ShutDownError(f"rank {self._topology.rank} was interrupted by {type(error).__name__}"))
            raise
        return True

    def _step(self, eager: bool, waited: bool) -> bool:
        active = bool(self.commands)
        while self.commands:
            self.commands.popleft()()
        lone = self._worker.lone() if self._unison.on else None
        if lone is not None and self._run_in_unison(lone):
            return True
        ready = self._worker.outgoing()
        if ready is not None:
            self._tell_coordinator(ready)
        lost = self._lost  # looked at first, because what the lost rank said last may explain more
        for sender, data in self.channel.receive():
            active = True
            self._hear(sender, decode(data))
        if self._coordinator is not None and not self.finished:
            self._coordinate(self._coordinator)
        if self._batches and not self.finished and (eager or self._is_due(waited)):
            active = True
            self._run_batches()
        if lost is not None and not self.finished:
            self.fail(self._loss(lost))
        if self._leave_deadline is not None and time.monotonic() > self._leave_deadline:
            logger.warning("rank %d: not every rank answered the shutdown in time", self._topology.rank)
            self.finished = True
        return active

    # In unison.

    def _begin_unison(self) -> None:
        """Declines at once where anything is in flight: it may be decided, and others wait in it for this rank."""
        self._unison.begin()
        changing = self._coordinator is not None and self._coordinator.is_changing
        if self._batches or not self._worker.is_idle or changing:
            self._unison.decline()

    def _run_in_unison(self, lone: Response) -> bool:
        """Run ``lone`` if all ranks do so now; until that is known, nothing else happens here."""
        self._alone_since, self._withdrawn = time.monotonic(), False
        attempt = partial(self._unison.attempt, lone.id, waiting=partial(self._wait_in_unison, lone.request))
        if not self._runner.attempt(lone, attempt):
            return False
        self._worker.finish_lone(lone)
        if self._coordinator is not None:
            self._coordinator.use(lone.id)
        return True

    def _wait_in_unison(self, request: Request, round: int, absent: Sequence[int]) -> None:
        """Every few milliseconds. Where there are other things to do, or it takes long, who has not come declines."""
        now = time.monotonic()
        late = now > self._alone_since + UNISON_SECONDS
        if not self._withdrawn and (late or self.commands or self.channel.peek()):
            self._withdrawn = True
            self.channel.send_to(self._listeners(), encode(Withdraw(round)))
        if self.channel.has_unsent:
            self.channel.flush(FLUSH_SECONDS)
        if self._leave_asked is not None and now > self._leave_asked + self._timeouts.shutdown:
            text = f"Horovod has been shut down by rank {self._topology.rank}, and not every rank answered in time"
            self.fail(ShutDownError(text))
        if self._coordinator is not None and self._stalls is not None:
            present = tuple(rank for rank in range(self._topology.size) if rank not in absent)
            self._inspect(self._stalls, {request.key: Waiting(self._alone_since, tuple(absent), present)}, now)

    def _listeners(self) -> Sequence[int]:
        """Whom this rank can speak to."""
        return range(1, self._topology.size) if self._coordinator is not None else (COORDINATOR,)

    def _is_due(self, waited: bool) -> bool:
        if time.monotonic() >= self._batches_since + self.parameters.patience:
            return True
        requests = (response.request for batch in self._batches for response in batch.responses)
        return not waited and self._works.is_urged(requests)

    # Messages.

    def _tell_coordinator(self, message: Message) -> None:
        self._unison.decline()
        if self._coordinator is not None:
            self._coordinator.receive(COORDINATOR, message, time.monotonic())
        else:
            self.channel.send(COORDINATOR, encode(message))

    def _coordinate(self, coordinator: Coordinator) -> None:
        now = time.monotonic()
        if self._stalls is not None:
            self._look_for_stalls(self._stalls, coordinator, now)
        for outgoing in coordinator.decide(now):
            data = encode(outgoing.message) if len(outgoing.ranks) > 1 or outgoing.ranks[0] != COORDINATOR else b""
            self.channel.send_to((rank for rank in outgoing.ranks if rank != COORDINATOR), data)
            if COORDINATOR in outgoing.ranks:
                self._obey(outgoing.message)

    def _look_for_stalls(self, stalls: StallInspector, coordinator: Coordinator, now: float) -> None:
        """Report what waits for too long. One look at a time is planned, so that a busy job pays nothing for it."""
        if self._inspect_at is None:
            if coordinator.is_waiting:
                self._inspect_at = now + stalls.patience
        elif now >= self._inspect_at:
            waiting = coordinator.waiting()
            self._inspect(stalls, waiting, now)
            self._inspect_at = stalls.deadline(waiting)

    def _inspect(self, stalls: StallInspector, waiting: Mapping[tuple[int, str], Waiting], now: float) -> None:
        report = stalls.inspect(waiting, now)
        if not report.text:
            return
        if report.fatal:
            self.fail(CollectiveTimeoutError(report.text))
        else:
            logger.warning("%s", report.text)

    def _hear(self, sender: int, message: Message) -> None:
        if isinstance(message, Abort):
            self.fail(unpack(message.error))
        elif isinstance(message, Withdraw):
            self._unison.withdraw(message.round)
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
            work = self._works.take(refusal.key)
            if work is not None:
                self._runner.complete(work, refusal.error)
        elif isinstance(message, Unknown):
            self._worker.resend(message)
        elif isinstance(message, Stop):
            self._stop(message.rank)
        elif isinstance(message, Left):
            self.finished = True

    def _run_batches(self) -> None:
        """Run what was decided; first the peers must have heard of it, or they would not come.

        Only the coordinator waits for that: it has run everything older, so its peers are, or will be, reading. A
        worker that waited for a coordinator which is in a backend already would keep both waiting.
        """
        deadline = time.monotonic() + self._timeouts.collective
        while self._coordinator is not None and self.channel.has_unsent and self._may_flush(deadline):
            self.channel.flush(FLUSH_SECONDS)
        while self._batches and not self.finished:
            batch = self._batches.popleft()
            self._runner.run(batch)
            if batch.unison:
                self._begin_unison()

    def _may_flush(self, deadline: float) -> bool:
        return self._lost is None and not self.finished and time.monotonic() <= deadline

    # Ends: polite, and not.

    def ending(self) -> Exception:
        """What pending works end with, and who comes too late."""
        return self.failure or ShutDownError("Horovod has been shut down; call hvd.init() to start again")

    def leave(self) -> None:
        """Begin the polite end, with the next step; from any thread."""
        self._leave_asked = time.monotonic()
        self.commands.append(self._leave)

    def _leave(self) -> None:
        self._leave_deadline = time.monotonic() + self._timeouts.shutdown
        self._tell_coordinator(Leave())

    def _stop(self, rank: int) -> None:
        self._run_batches()
        text = f"Horovod has been shut down by rank {rank} while the tensor was in flight"
        self._fail_works(ShutDownError(text))
        self._leaving = True
        self._tell_coordinator(Left())

    def _fail_works(self, error: Exception) -> None:
        for work in self._works.close(self.ending()):
            if not work.done:
                self._runner.fail(work, error)

    def fail(self, error: HorovodInternalError) -> None:
        """End everything here with ``error`` and tell the others."""
        if self.finished:
            return
        self.failure = error
        self._runner.abort(error)
        data = encode(Abort(pack(error)))
        self.channel.send_to(self._listeners(), data)
        self._fail_works(error)
        self.finished = True
        self._announce()

    def abort(self, error: HorovodInternalError) -> None:
        """End everything with ``error``; from any thread."""
        self.commands.append(lambda: self.fail(error))
        self._runner.abort(error)

    def lose(self, rank: int) -> None:
        """On the channel's watch thread: the connection to ``rank`` ended."""
        if self._lost is None:
            self._lost = rank
        if not (self._leaving or self.finished):
            self._runner.abort(self._loss(rank))

    def close(self) -> None:
        """Release everything; what is pending still fails."""
        self.finished = True
        with ExitStack() as stack:
            for backend in self._runner.backends():
                stack.callback(backend.close)
            stack.callback(self.channel.close)
            self._fail_works(self.ending())

    def _loss(self, rank: int) -> PeerLostError:
        return PeerLostError(
            f"rank {rank} on host {self._topology.hosts[rank]!r} is gone: its process ended or its connection broke; "
            f"look at the output of that rank",
            [rank],
            [self._topology.hosts[rank]],
        )

    def _verdict(self, error: HorovodInternalError) -> HorovodInternalError:
        """The best explanation of ``error``: what another rank said, or whose connection ended; waits a moment."""
        deadline = time.monotonic() + VERDICT_SECONDS
        while not self.finished and time.monotonic() < deadline:
            lost = self._lost
            for _, data in self.channel.receive():
                message = decode(data)
                if isinstance(message, Abort):
                    return unpack(message.error)
            if lost is not None:
                return self._loss(lost) if isinstance(error, PeerLostError | CollectiveTimeoutError) else error
            if not isinstance(error, PeerLostError | CollectiveTimeoutError):
                break
            self.channel.poll(0.05)
        return error
