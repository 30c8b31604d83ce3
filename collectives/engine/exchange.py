"""One rank's part in the protocol: exchanges messages through its link, runs decided batches, and ends in one way.

Only the backends wait for another rank. A method is for the thread that drives, unless its docstring says that it is
for any thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    ShutDownError,
    Timeouts,
    Topology,
)
from collectives.control.base import Channel
from collectives.engine.deciders.base import Decider, Trial
from collectives.engine.dispatch import Dispatch
from collectives.engine.ending import Ending
from collectives.engine.link import COORDINATOR, FLUSH_SECONDS, Link
from collectives.engine.lookout import Lookout
from collectives.engine.runner import Runner
from collectives.engine.silence import Silence, explain
from collectives.engine.work import Work
from collectives.engine.work_table import WorkTable
from collectives.parameters import Parameters
from collectives.planning.errors import pack, unpack
from collectives.planning.messages import Abort, Inquiry, Leave, Left, Status, Stop
from collectives.planning.stalls import Pending, Waiting

__all__ = ["Exchange"]

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 0.1

Command: TypeAlias = Callable[[], None]


class Exchange:
    """Owns the channel, and carries out the decisions of ``decider``.

    ``commands`` are requests of other threads, in order. ``finished`` turns true once, when only the close is left to
    do; ``failure`` is then the reason of an abrupt end, None for a polite one. ``announce`` wakes the callers that wait
    for a work. ``end`` has ``finished`` and ``failure`` as attributes, for loops that read them often. ``dispatch``
    already has handlers for the messages of the decider. ``parameters`` are those of the last batch that ran.
    """

    def __init__(
        self,
        topology: Topology,
        timeouts: Timeouts,
        channel: Channel,
        link: Link,
        decider: Decider,
        dispatch: Dispatch,
        works: WorkTable,
        runner: Runner,
        lookout: Lookout,
        silence: Silence,
        announce: Callable[[], None],
        parameters: Parameters,
    ) -> None:
        self.channel = channel
        self.parameters = parameters
        self.commands: deque[Command] = deque()
        self._topology = topology
        self._timeouts = timeouts
        self._link = link
        self._decider = decider
        self._decided = decider.decided
        self._dispatch = dispatch
        self._works = works
        self._runner = runner
        self._lookout = lookout
        self._silence = silence
        self._announce = announce
        self._trial: Trial | None = None
        self._trial_since: float | None = None
        self.end = self._ending = Ending(topology, timeouts.shutdown)
        dispatch.on(Stop, self._stop)
        dispatch.on(Status, self._hear_status)
        dispatch.on(Left, lambda _: self._ending.finish())
        dispatch.on(Abort, lambda message: self.fail(unpack(message.error)))

    @property
    def finished(self) -> bool:
        """Whether only the close is left to do."""
        return self._ending.finished

    @property
    def failure(self) -> Exception | None:
        """Why it ended abruptly, if it did."""
        return self._ending.failure

    @property
    def deadline(self) -> float | None:
        """When :meth:`step` must be called again even if no message arrives, in monotonic seconds; None: never."""
        run = self._decided.since + self.parameters.patience if self._decided else None
        look = self._silence.deadline if self._works else None
        times = (self._link.deadline, run, self._ending.deadline, look, self._runner.deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """Whether only a message, or an action of another thread, gives :meth:`step` something to do."""
        idle = not (self.commands or self._decided.batches or self._runner.flights)
        return idle and not (self._link.is_holding or self.channel.has_unsent)

    @property
    def has_batches(self) -> bool:
        """Whether some decided batches have not run yet."""
        return bool(self._decided.batches)

    @property
    def has_works(self) -> bool:
        """Whether any work is in flight."""
        return bool(self._works or self._runner.flights)

    @property
    def may_sleep(self) -> bool:
        """Whether there is no command, loss or end that a wait in the channel would miss."""
        return not self.commands and self._is_whole

    @property
    def _is_whole(self) -> bool:
        return self._ending.lost is None and not self._ending.finished

    def submit(self, works: Sequence[Work]) -> None:
        """Hand ``works`` to the decider, with the next step; from any thread.

        Works that failed before they were submitted are reported to the ranks that may wait for them.
        """
        self.commands.append(partial(self._submit, works))

    def _submit(self, works: Sequence[Work]) -> None:
        submit = self._decider.submit
        for work in works:
            if work.error is None:
                submit(work.request, work.urged)
            else:
                self._decider.reject(work.request, str(work.error))

    def urge(self, work: Work) -> None:
        """Let no rank hold ``work`` back; from any thread."""
        self._works.urge(work)
        self.commands.append(lambda: self._decider.urge(work.request.key))

    def settle(self) -> None:
        """An operation of a device may be over: complete its works, with the next step; from any thread."""
        self.commands.append(self._settle)

    def _settle(self) -> None:
        self._runner.settle()

    def propose(self, parameters: Parameters) -> None:
        """On the coordinator: let ``parameters`` hold from the next batch on; from any thread."""
        self.commands.append(partial(self._propose, parameters))

    def _propose(self, parameters: Parameters) -> None:
        self._decider.decline()  # the ranks hear of parameters with a batch that the coordinator decides
        self._link.propose(parameters)

    def step(self, eager: bool, waited: bool) -> bool:
        """Do all pending work; return whether there was any.

        Unless ``eager``, decided batches are left to the callers that will soon wait, or wait (``waited``), for them:
        with no core to spare, a batch on the communication thread would take one from a rank that runs it, too.
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
        while (trial := self._decider.next()) is not None:
            if self._attempt(trial):
                return True
            self._decider.decline()
        lost = self._ending.lost  # read first, because the last messages of the lost rank may explain more
        for message in self._link.hear():
            active = True
            self._dispatch(message)
            if self._ending.finished:
                return True
        if self._decided and (eager or self._is_due(waited)):
            active = True
            self._run_decided()
        if self._runner.flights and self._runner.settle():
            active = True
        if lost is not None:
            self.fail(self._ending.loss(lost))
        if self._works:
            self._listen()
        self._expire()
        return active

    def _expire(self) -> None:
        if self._ending.deadline is not None and self._ending.expire(time.monotonic()):
            logger.warning("rank %d: %s", self._topology.rank, self._ending.unanswered(self._link.unanswered()))

    # The coordinator's silence.

    def _listen(self) -> None:
        """Ask the coordinator when tensors wait for long; if it does not answer, report that, and end in time."""
        verdict = self._silence.look(time.monotonic())
        if verdict.ask:
            self._link.tell(Inquiry())
        if verdict.seconds is not None:
            self._lookout.note(self._works.since(), (COORDINATOR,), time.monotonic())
            text = explain(self._topology, self._works.describe(), verdict.seconds)
            if verdict.fatal:
                remark = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is over: the job ends"
                self.fail(CollectiveTimeoutError(f"{text}. {remark}", [COORDINATOR]))
            else:
                logger.warning("%s", text)

    def _hear_status(self, message: Status) -> None:
        self._silence.answered(time.monotonic())
        if message.text:
            self._lookout.note(self._works.since(), (), time.monotonic())
            logger.warning("rank %d heard from rank %d: %s", self._topology.rank, COORDINATOR, message.text)

    # Decisions.

    def _attempt(self, trial: Trial) -> bool:
        """Run ``trial`` if all ranks do so now; until that is known, this rank does nothing else."""
        self._trial, self._trial_since = trial, None
        try:
            return self._runner.attempt(trial, self._wait_in_trial)
        finally:
            self._trial = None  # it refers to the works, and so to the users' tensors

    def _wait_in_trial(self, absent: Sequence[int]) -> bool:
        """See :data:`Meanwhile`."""
        now = time.monotonic()
        if self.channel.has_unsent:
            self.channel.flush(FLUSH_SECONDS)
        overdue = self._ending.overdue(now, absent)
        if overdue is not None:
            self.fail(overdue)
        fatal = self._lookout.report(self._waiting_in_trial(absent, now), now)
        if fatal is not None:
            self.fail(fatal)
        return bool(self.commands) or self.channel.peek()

    def _waiting_in_trial(self, absent: Sequence[int], now: float) -> Pending:
        if self._trial is None:
            return {}
        if self._trial_since is None:
            self._trial_since = now
        present = tuple(rank for rank in range(self._topology.size) if rank not in absent)
        waiting = Waiting(self._trial_since, tuple(absent), present)
        return {response.request.key: waiting for batch in self._trial.batches for response in batch}

    def _is_due(self, waited: bool) -> bool:
        if time.monotonic() >= self._decided.since + self.parameters.patience:
            return True
        requests = (response.request for batch in self._decided.batches for response in batch.responses)
        return not waited and self._works.is_urged(requests)

    def _run_decided(self) -> None:
        """Run the decided batches; the peers must hear of them first, or they would not take part."""
        deadline = time.monotonic() + self._timeouts.collective
        self._link.settle(lambda: self._is_whole and time.monotonic() <= deadline)
        batches = self._decided.batches
        while batches and not self._ending.finished:
            batch = batches.popleft()
            self._runner.run(batch)
            self._decider.ran(batch)

    # Ends: polite, and not.

    def ending(self) -> Exception:
        """The error of pending works, and of later calls."""
        return self._ending.error()

    def leave(self) -> None:
        """Begin the polite end, with the next step; from any thread."""
        self._ending.ask(time.monotonic())
        self.commands.append(self._leave)

    def _leave(self) -> None:
        self._ending.leave(time.monotonic())
        self._decider.decline()
        self._decider.next()  # which reports the calls that failed here: the other ranks must not miss the reason
        self._link.tell(Leave())

    def _stop(self, message: Stop) -> None:
        self._run_decided()
        self._runner.drain(self._timeouts.collective)
        self._works.refuse({(refuse.process_set, refuse.name): refuse.error() for refuse in message.refused})
        self._fail_works(self._ending.stop(message.rank, message.refused[0].text if message.refused else ""))
        self._decider.decline()
        self._link.tell(Left())

    def _fail_works(self, error: Exception) -> None:
        for work in self._works.close(self.ending()):
            if not work.done:
                self._runner.fail(work, self._works.refusal([work]) or error)
        self._runner.fail_flights(error)

    def fail(self, error: HorovodInternalError) -> None:
        """End everything here with ``error`` and tell the others."""
        if self._ending.fail(error):
            self._runner.abort(error)
            self._link.tell_all(Abort(pack(error)))
            self._fail_works(error)
            self._ending.finish()
            self._announce()

    @property
    def is_leaving(self) -> bool:
        """Whether the polite end has begun here: no caller is expected to drive any more."""
        return self._ending.deadline is not None

    def abort(self, error: HorovodInternalError) -> None:
        """End everything with ``error``; from any thread."""
        self.commands.append(lambda: self.fail(error))
        self._runner.abort(error)

    def lose(self, rank: int) -> None:
        """On the channel's watch thread: the connection to ``rank`` ended."""
        error = self._ending.lose(rank)
        if error is not None:
            self._runner.abort(error)

    def disown(self) -> None:
        """In a forked child: close this copy of the connections, silently; the parent keeps its own. Takes no lock."""
        self._works.disown(self.ending())
        self._ending.finish()
        self.channel.disown()

    def close(self) -> None:
        """Release everything; works that are still pending fail."""
        self._ending.finish()
        with ExitStack() as stack:
            for backend in self._runner.backends():
                stack.callback(backend.close)
            stack.callback(self.channel.close)
            self._fail_works(self.ending())

    def _verdict(self, error: HorovodInternalError) -> HorovodInternalError:
        """The best explanation of ``error``: another rank's error, or the loss of a rank; waits a moment."""
        deadline = time.monotonic() + VERDICT_SECONDS
        while not self._ending.finished and time.monotonic() < deadline:
            lost = self._ending.lost
            for _, message in self._link.arrivals():
                if isinstance(message, Abort):
                    return unpack(message.error)
            if not isinstance(error, PeerLostError | CollectiveTimeoutError):
                break
            if lost is not None:
                return self._ending.loss(lost)
            self.channel.poll(0.05)
        return error
