"""One rank's part in the protocol: takes what this rank submits, exchanges messages, and runs the decided batches.

Only the backends wait for another rank. A method is for the thread that drives, unless its docstring says that it is
for any thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from collectives.api import MismatchError, Timeouts
from collectives.control.base import Channel
from collectives.engine.attendance import Attendance
from collectives.engine.commands import Commands
from collectives.engine.deciders.base import Decider
from collectives.engine.dispatch import Dispatch
from collectives.engine.ends import Ends
from collectives.engine.link import Link
from collectives.engine.runner import Runner
from collectives.engine.trials import Trials
from collectives.engine.work import Work
from collectives.engine.work_table import WorkTable
from collectives.parameters import Changes, Parameters
from collectives.planning.messages import ABANDONED, Stop

__all__ = ["Exchange"]


class Exchange:
    """Owns the channel, and carries out the decisions of ``decider``.

    ``commands`` are requests of other threads. ``dispatch`` has the handlers of all messages, of which :meth:`stop` is
    one. ``parameters`` are those of the last batch that ran. Any thread may set ``overdue``: messages have waited for
    long. It is unset when they are heard.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        channel: Channel,
        link: Link,
        decider: Decider,
        dispatch: Dispatch,
        works: WorkTable,
        runner: Runner,
        trials: Trials,
        attendance: Attendance,
        ends: Ends,
        commands: Commands,
        parameters: Parameters,
    ) -> None:
        self.channel = channel
        self.parameters = parameters
        self.commands = commands
        self.overdue = False
        self.ends = ends
        self._ending = ends.ending
        self._timeouts = timeouts
        self._link = link
        self._decider = decider
        self._decided = decider.decided
        self._dispatch = dispatch
        self._works = works
        self._runner = runner
        self._attempt = trials.attempt
        self._attendance = attendance
        self._inquiries = attendance.inquiries

    @property
    def deadline(self) -> float | None:
        """When :meth:`step` must be called again even if no message arrives, in monotonic seconds; None: never."""
        run = self._decided.since + self.parameters.patience if self._decided else None
        look, end = self._inquiries.deadline, self._ending.deadline
        times = (self._link.deadline, run, end, look, self._runner.deadline)
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
    def batches(self) -> int:
        """The number of batches that were decided, in any way; for any thread."""
        return self._decider.worker.next_batch

    @property
    def has_works(self) -> bool:
        """Whether any work is in flight."""
        return bool(self._works or self._runner.flights)

    @property
    def may_sleep(self) -> bool:
        """Whether there is no command, loss or end that a wait in the channel would miss."""
        return not self.commands and self._ending.is_whole

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

    def abandon(self, works: Sequence[Work]) -> None:
        """This rank does not want ``works`` any more, see :meth:`Engine.abandon`; from any thread."""
        self.commands.append(partial(self._abandon, works))

    def _abandon(self, works: Sequence[Work]) -> None:
        if any(work.is_counted for work in works):
            return
        if self._works.withdraw(works):  # they wait behind a call that failed here, and that others may never make
            for work in works:
                self._runner.complete(work, MismatchError(ABANDONED, work.request.name))
            return
        for work in works:
            refusal = self._decider.abandon(work.request.key) if self._works.has(work) else None
            if refusal is not None:
                self._runner.refuse(refusal)

    def settle(self) -> None:
        """An operation of a device may be over: complete its works, with the next step; from any thread."""
        self.commands.append(self._runner.settle)

    def rouse(self) -> None:
        """Let the thread that drives look again at what it waits for, before it sleeps; from any thread."""
        self.commands.append(lambda: None)

    def propose(self, changes: Changes) -> None:
        """On the coordinator: let ``changes`` to the parameters hold from the next batch on; from any thread."""
        self.commands.append(partial(self._propose, changes))

    def _propose(self, changes: Changes) -> None:
        self._decider.decline()  # the ranks hear of parameters with a batch that the coordinator decides
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
        while self.commands:
            self.commands.popleft()()
        while self._try():
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
        if self._decided and (eager or self._is_due(waited)):
            active = True
            self._run_decided()
        if self._runner.flights and self._runner.settle():
            active = True
        if lost is not None:
            self.ends.fail(self._ending.loss(lost))
        if self._works:
            self._inquiries.look()
        self.ends.expire()
        return active

    def _try(self) -> bool:
        """Attempt the trials of the decider, up to the first that runs; return whether one did."""
        while (trial := self._decider.next()) is not None:
            if self._attempt(trial):
                return True
            self._decider.decline()
        return False

    def run_now(self, work: Work) -> bool:
        """Run ``work``, a call of this rank that repeats an earlier one, if this rank has nothing else to do.

        It takes the short way of such calls: no command, no submission, and no look at messages before the trial.
        Return whether the work entered. If the ranks do not run it together now, it is submitted as any work.
        """
        if self.commands or self._runner.flights:
            return False
        trial = self._decider.repeat(work.request)
        if trial is None or not self._works.admit(work):
            return False
        try:
            if not self._attempt(trial, ((work,),)):
                self._decider.decline()
                self.submit((work,))
        except BaseException as error:
            self.ends.break_off(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _is_due(self, waited: bool) -> bool:
        if time.monotonic() >= self._decided.since + self.parameters.patience:
            return True
        requests = (response.request for batch in self._decided.batches for response in batch.responses)
        return not waited and self._works.is_urged(requests)

    def _run_decided(self) -> None:
        """Run the decided batches; the peers must hear of them first, or they would not take part."""
        self._link.settle(partial(self._may_settle, time.monotonic() + self._timeouts.collective))
        batches = self._decided.batches
        while batches and not self._ending.finished:
            batch = batches.popleft()
            self._runner.run(batch)
            self._decider.ran(batch)

    def _may_settle(self, deadline: float) -> bool:
        """While messages wait for a rank that does not read: answer the others; return whether to wait for longer."""
        self._attendance.attend()
        return self._ending.is_whole and time.monotonic() <= deadline

    def stop(self, message: Stop) -> None:
        """The coordinator stops the job: batches that were decided before still run."""
        self._run_decided()
        self.ends.stop(message)
