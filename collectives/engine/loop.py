"""One rank's part in the protocol: takes submissions, exchanges messages, runs the decided batches.

Only the backends wait for another rank. A method is for the thread that drives, unless its docstring says that it is
for any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from collectives.api import Changes, EngineError, MismatchError, Parameters, Timeouts, Topology
from collectives.controller.messages import ABANDONED, Message, Stop
from collectives.controller.schedules import Schedule
from collectives.controller.waits import Pending, Waiting
from collectives.controller.worker import Worker
from collectives.engine.bypass import Bypass
from collectives.engine.link import FLUSH_SECONDS, Link
from collectives.engine.negotiation import Negotiation
from collectives.engine.runner import Runner
from collectives.engine.shutdown import Ends
from collectives.engine.threads import CommandKind, CommandQueue, DrivingThread
from collectives.engine.work import Work
from collectives.engine.work_table import WorkTable
from collectives.net.channel import Channel
from collectives.stalls.inspector import StallReporter
from collectives.stalls.status import StatusProbe
from collectives.stalls.watchdog import CoordinatorWatch

Kind = TypeVar("Kind")


class Dispatch:
    """One handler for each class of messages."""

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def on(self, kind: type[Kind], handle: Callable[[Kind], None]) -> None:
        """Make ``handle`` the handler of all messages of ``kind``; EngineError if they have one already."""
        if kind in self._handlers:
            raise EngineError(f"messages of kind {kind.__name__} already go to {self._handlers[kind]!r}")
        self._handlers[kind] = handle

    def __call__(self, message: Message) -> None:
        """Call the handler; EngineError for a message that no rank expects from its coordinator."""
        handle = self._handlers.get(type(message))
        if handle is None:
            raise EngineError(f"{message!r} is not a message for this rank")
        handle(message)


class WaitDuties:
    """Answers the coordinator, keeps the ``watch`` on it and hears of the end of other ranks, while this rank waits.

    That is inside an operation or a vote. It also sends the answers of ``probe``. All other messages wait for the end
    of the operation. ``driving`` tells whether the calling thread drives. ``has_messages``: some may wait to be sent
    or heard. It is unset only where none does.
    """

    def __init__(
        self,
        link: Link,
        dispatch: Dispatch,
        watch: CoordinatorWatch,
        probe: StatusProbe,
        driving: DrivingThread,
        ends: Ends,
    ) -> None:
        self._link = link
        self._dispatch = dispatch
        self._watch = watch
        self._probe = probe
        self._driving = driving
        self._ends = ends
        self.has_messages = True

    def wait(self) -> None:
        """An ``OnWait`` of backends. Only the thread that drives may use the channel."""
        if self._driving.is_here():
            self.attend()

    def attend(self) -> bool:
        """On the thread that drives: do what may not wait; return whether messages have been kept for later."""
        self.has_messages = True
        for message in self._link.attend():
            self._dispatch(message)
        self.look()
        self._probe.look(in_operation=True)
        return self._link.has_kept

    def look(self) -> None:
        """End the job if the coordinator has been silent for too long."""
        silent = self._watch.look()
        if silent is not None:
            self._ends.fail(silent)

    @property
    def deadline(self) -> float | None:
        """When :meth:`look` must be called, in monotonic seconds; None: not before a tensor is in flight."""
        return self._watch.deadline

    def answer(self) -> None:
        """Send where this rank stands, outside of an operation."""
        self._probe.look()


class VoteDuties:
    """The duties of this rank while it waits in a vote, until it knows whether all ranks run the schedule.

    So each wait sends what is unsent, lets ``stalls`` report the missing ranks, ends a shutdown that takes too long,
    does the ``duties`` inside of an operation, and notices the requests of ``queue``. For the thread that drives.
    """

    def __init__(
        self,
        topology: Topology,
        channel: Channel,
        stalls: StallReporter,
        ends: Ends,
        queue: CommandQueue,
        duties: WaitDuties,
    ) -> None:
        self._topology = topology
        self._channel = channel
        self._stalls = stalls
        self._ends = ends
        self._commands = queue.commands
        self._duties = duties

    def wait(self, schedule: Schedule, absent: Sequence[int], since: float) -> bool:
        """This rank waits ``since`` then, in monotonic seconds, because ``absent`` ranks have not entered the round.

        Return whether this rank has other work.
        """
        now = time.monotonic()
        if self._channel.has_unsent:
            self._channel.flush(FLUSH_SECONDS)
        overdue = self._ends.ending.overdue(now, absent)
        if overdue is not None:
            self._ends.fail(overdue)
        fatal = self._stalls.report(_waiting_for(schedule, absent, since, self._topology.size), now)
        if fatal is not None:
            self._ends.break_off(fatal)
        return self._duties.attend() or bool(self._commands)


def _waiting_for(schedule: Schedule, absent: Sequence[int], since: float, size: int) -> Pending:
    if not absent:
        return {}
    present = tuple(rank for rank in range(size) if rank not in absent)
    waiting = Waiting(since, tuple(absent), present)
    return {response.request.key: waiting for batch in schedule.batches for response in batch}


def _nothing() -> None:
    return


class EngineLoop:
    """Owns the channel, and runs what the ranks decide: through the ``bypass``, or in the ``negotiation``.

    ``worker`` records the tensors that this rank submits. ``queue`` has the requests of other threads. ``dispatch`` has
    the handlers of all messages, of which :meth:`stop` is one. Any thread may set ``overdue``: messages have waited for
    long. It is unset when they are heard.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        channel: Channel,
        link: Link,
        worker: Worker,
        bypass: Bypass,
        negotiation: Negotiation,
        dispatch: Dispatch,
        works: WorkTable,
        runner: Runner,
        vote_duties: VoteDuties,
        duties: WaitDuties,
        ends: Ends,
        queue: CommandQueue,
    ) -> None:
        self.channel = channel
        self.commands = queue.commands
        self.overdue = False
        self.ends = ends
        self._ending = ends.ending
        self._timeouts = timeouts
        self._link = link
        self._worker = worker
        self._bypass = bypass
        self._negotiation = negotiation
        self._dispatch = dispatch
        self._works = works
        self._runner = runner
        self._during_vote = vote_duties.wait
        self._duties = duties
        self._sent = 0
        self._handlers: dict[CommandKind, Callable[[Any], object]] = {
            CommandKind.SUBMIT: self._submit,
            CommandKind.URGE: worker.urge,
            CommandKind.SETTLE: lambda _: runner.settle(),
            CommandKind.ANSWER: lambda _: duties.answer(),
            CommandKind.CALL: lambda function: function(),
        }

    @property
    def parameters(self) -> Parameters:
        """Those of the last batch that ran."""
        return self._runner.parameters

    @property
    def deadline(self) -> float | None:
        """When :meth:`step` must be called again even if no message arrives, in monotonic seconds; None: never."""
        negotiation = self._negotiation
        run = negotiation.since + self.parameters.patience if negotiation.batches else None
        look, end = self._duties.deadline, self._ending.deadline
        times = (self._link.deadline, run, end, look, self._runner.deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """Whether only a message, or an action of another thread, gives :meth:`step` something to do."""
        if self.commands or self._negotiation.batches or self._runner.flights:
            return False
        if not self._duties.has_messages and self._link.sent == self._sent:  # as at the end of run_now()
            return True
        return not (self._link.is_holding or self.channel.has_unsent)

    @property
    def has_batches(self) -> bool:
        """Whether some decided batches have not run yet."""
        return bool(self._negotiation.batches)

    @property
    def batches(self) -> int:
        """The number of batches that were decided, in any way; for any thread."""
        return self._worker.next_batch

    @property
    def has_works(self) -> bool:
        """Whether any work is in flight."""
        return bool(self._works or self._runner.flights)

    @property
    def may_sleep(self) -> bool:
        """Whether there is no command, loss or end that a wait in the channel would miss."""
        return not self.commands and self._ending.is_whole

    def submit(self, works: Sequence[Work]) -> None:
        """Hand ``works`` to the worker, with the next step; from any thread.

        Works that failed before they were submitted are reported to the ranks that may wait for them.
        """
        self.commands.append((CommandKind.SUBMIT, works))

    def _submit(self, works: Sequence[Work]) -> None:
        submit = self._worker.submit
        for work in works:
            if work.error is None:
                submit(work.request, work.urged)
            else:
                self._worker.reject(work.request, str(work.error))

    def abandon(self, works: Sequence[Work]) -> None:
        """This rank does not want ``works`` any more, see :meth:`Engine.abandon`; from any thread."""
        self.commands.append((CommandKind.CALL, partial(self._abandon, works)))

    def _abandon(self, works: Sequence[Work]) -> None:
        if any(work.is_counted for work in works):
            return
        if self._works.withdraw(works):  # they wait behind a call that failed here, and that others may never make
            for work in works:
                self._runner.complete(work, MismatchError(ABANDONED, work.request.name))
            return
        for work in works:
            refusal = self._worker.abandon(work.request.key) if self._works.has(work) else None
            if refusal is not None:
                self._runner.refuse(refusal)

    def rouse(self) -> None:
        """Let the thread that drives look again at what it waits for, before it sleeps; from any thread."""
        self.commands.append((CommandKind.CALL, _nothing))

    def propose(self, changes: Changes) -> None:
        """On the coordinator: let ``changes`` to the parameters hold from the next batch on; from any thread."""
        self.commands.append((CommandKind.CALL, partial(self._propose, changes)))

    def _propose(self, changes: Changes) -> None:
        self._bypass.decline()  # the ranks hear of parameters with a batch that the coordinator decides
        self._link.propose(changes)

    def step(self, eager: bool, waited: bool) -> bool:
        """Do all pending work; return whether there was any.

        Unless ``eager``, decided batches are left to the callers that will soon wait, or wait (``waited``), for them:
        with no core to spare, a batch on the communication thread would take one from a rank that runs it, too.
        """
        try:
            return self._step(eager, waited)
        except BaseException as error:
            self.ends.break_off(error)
            if not isinstance(error, Exception):
                raise
            return True

    def _step(self, eager: bool, waited: bool) -> bool:
        active = bool(self.commands)
        self._duties.has_messages = True
        while self.commands:
            command, argument = self.commands.popleft()
            self._handlers[command](argument)
        while self._bypass_coordinator():
            if not self.overdue:
                return True
            active = True
        self.overdue = False
        lost = self._ending.lost  # read first, because the last messages of the lost rank may explain more
        for message in self._link.hear():
            active = True
            self._dispatch(message)
            if self._ending.finished:
                return True
        if self._negotiation.batches and (eager or self._is_due(waited)):
            active = True
            self._run_decided()
        if self._runner.flights and self._runner.settle():
            active = True
        if lost is not None:
            self.ends.fail(self._ending.loss(lost))
        if self._works:
            self._duties.look()
        self.ends.expire()
        return active

    def _bypass_coordinator(self) -> bool:
        """Run the tensors in flight if all ranks run them now, and return whether they do; or tell the coordinator."""
        schedule = self._bypass.next()
        if schedule is not None:
            if self._bypass.attempt(schedule, self._during_vote):
                return True
            self._bypass.decline()
        self._negotiation.report()
        return False

    def run_now(self, work: Work) -> bool:
        """Run ``work``, a call of this rank that repeats an earlier one, if this rank has nothing else to do.

        It takes the short way of such calls: no command, no submission, and no look at messages before the vote.
        Return whether the work entered. If the ranks do not run it together now, it is submitted as any work.
        """
        if self.commands or self._runner.flights or self._negotiation.batches:
            return False
        schedule = self._bypass.repeat(work.request)
        if schedule is None or not self._works.admit(work):
            return False
        try:
            if not self._bypass.attempt(schedule, self._during_vote, ((work,),)):
                self._bypass.decline()
                self.submit((work,))
            if self._duties.has_messages or self._link.sent != self._sent:
                self._sent = self._link.sent
                self._duties.has_messages = self._link.is_holding or self.channel.has_unsent
        except BaseException as error:
            self.ends.break_off(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _is_due(self, waited: bool) -> bool:
        if time.monotonic() >= self._negotiation.since + self.parameters.patience:
            return True
        requests = (response.request for batch in self._negotiation.batches for response in batch.responses)
        return not waited and self._works.is_urged(requests)

    def _run_decided(self) -> None:
        """Run the decided batches; the peers must hear of them first, or they would not take part."""
        self._link.settle(partial(self._may_settle, time.monotonic() + self._timeouts.collective))
        batches = self._negotiation.batches
        while batches and not self._ending.finished:
            batch = batches.popleft()
            self._runner.run(batch)
            self._negotiation.ran(batch)

    def _may_settle(self, deadline: float) -> bool:
        """While messages wait for a rank that does not read: answer the others; return whether to wait for longer."""
        self._duties.attend()
        return self._ending.is_whole and time.monotonic() <= deadline

    def stop(self, message: Stop) -> None:
        """The coordinator stops the job: batches that were decided before still run."""
        self._run_decided()
        self.ends.stop(message)
