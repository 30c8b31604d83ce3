"""The interface between the driver of a job and an executor: agents that start, watch and end workers on hosts."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from collectives.handshake.entries import EndNotes
from executors.api import ExecutorError, Slot, StartTimeoutError, WorkerError, number_of
from executors.driver.failures import (
    CAUSE_SECONDS,
    FailedWorker,
    Failure,
    FailureKind,
    Failures,
    Patience,
    with_last_lines,
)
from executors.driver.member import WorkerIdentity
from executors.driver.worlds import (
    CALL,
    REPORTS,
    Published,
    Report,
    WorldCall,
    change_key,
    describe,
    losses,
    objection,
    summary,
    world_key,
)
from executors.job.environment import Course
from executors.job.job import Job, environment_of
from executors.membership import (
    Action,
    End,
    Event,
    HostDraining,
    HostFound,
    HostLost,
    HostUnusable,
    Limits,
    Membership,
    Overdue,
    Publish,
    Start,
    StopWorker,
    Tick,
    WorkerBehind,
    WorkerDone,
    WorkerDraining,
    WorkerFailed,
    WorkerLeaves,
    WorkerRaised,
    WorkerReady,
    WorldFailed,
    WorldFormed,
)

logger = logging.getLogger(__name__)


class Agents(Protocol):
    """Starts and ends workers, and runs the loop in which all calls to the driver are made.

    The agents report to the driver by its methods ``up``, ``done``, ``failed`` and ``host_lost``.
    """

    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        """Start ``worker`` on ``host`` with ``environment``, which has its place in the job."""

    def stop(self, worker: str) -> None:
        """Ask ``worker`` to end; it is killed if it does not."""

    def kill(self, worker: str) -> None:
        """End ``worker`` at once: it may be stopped, or hang."""

    def end(self, spare: str | None = None) -> None:
        """Ask all workers to end, and kill those that do not; ``spare`` is asked last."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` in the loop, ``seconds`` from now, unless the job is over before."""

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the loop; from any thread."""


# A worker that others accuse may have ended; for so long its agent may say how.
ACCUSED_SECONDS = 1.0
# An exception that nobody catches ends a process, after its handlers of atexit, unless one of its threads goes on.
UNCAUGHT_SECONDS = 5.0
# How a worker ended, until its agent says more. The other workers notice it first.
ENDED = Failure(FailureKind.EXIT, "ended")
# The agent says more as soon as the process has ended, which may have much memory to give back.
UNEXPLAINED_SECONDS = 60.0

GO_ON = "go on from the last commit"
STAY = "are too few to go on alone, and lose the host then"

NO_WORLD = Published(-1)
PATIENCE = Patience()


class Driver:
    """Starts and ends the workers of ``job`` by ``agents``, until the job is over, and publishes its worlds.

    Every method is called in the loop of ``agents``. :meth:`found` begins. A job with as many workers at least as at
    most, and no resets, is static: its first failure ends it, after the time of ``patience`` (None: PATIENCE), in which
    a likelier cause may be reported. ``machine`` is the machine of a host: hosts of one machine share its memory.
    ``withdraws`` returns whether the agents will :meth:`withdraw` a worker that is late, which is no failure then.
    """

    def __init__(
        self,
        limits: Limits,
        job: Job,
        agents: Agents,
        start_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        machine: Callable[[str], str] = str,
        patience: Patience | None = None,
        withdraws: Callable[[str], bool] = lambda worker: False,
    ) -> None:
        self._clock = clock
        self._machine = machine
        self._patience = patience or PATIENCE
        self._withdraws = withdraws
        self._limits = limits
        self._job = job
        self._agents = agents
        self._start_timeout = start_timeout
        self._membership = Membership(limits, random.random)
        self._slots: dict[str, int] = {}
        self._hosts: dict[str, str] = {}  # the machine of each worker
        self._places: dict[str, str] = {}  # its host, as the agents name it
        self._coming_up: set[str] = set()
        self._published = NO_WORLD
        self._ranked: dict[str, Slot] = {}  # the slots of that world
        # By round: the worlds since the last one that formed or was not planned; ranks may be in any of them.
        self._present: dict[int, Published] = {}
        # Changes are told since this world: it is the last one that formed, or else the first one.
        self._formed_last = NO_WORLD
        self._former: set[str] = set()
        self._lost: dict[str, str] = {}
        self._done: dict[str, str] = {}  # how members ended that had done their work
        # Workers whose agents have still to say how they ended, and changes that are told then.
        self._unexplained: set[str] = set()
        self._untold: list[Callable[[], None]] = []
        self._failures = Failures()
        self._blamed: str | None = None  # a worker that raised, but whose process has not ended
        self._order: tuple[str, ...] = ()
        # The call of an elastic function in which the ranks are, their world, and whether they have returned from it.
        self._stage = 0, 0, False
        self._report_formed: Report | None = None  # the last one of rank 0
        self._end: End | None = None
        self._timeout: StartTimeoutError | None = None
        self._is_ending = False
        # Ranks that wait in init() for one that has ended hear of it; in an elastic job they get another world.
        self._notes = None if limits.is_elastic else EndNotes(job.store, job.id)
        self._unsubscribe = job.subscribe(self._note_key) if limits.is_elastic else lambda: None

    # Events.

    def found(self, slots: Mapping[str, int]) -> None:
        """The hosts that the job may use now, each with its slots; others drain."""
        for host in self._slots.keys() - slots.keys():
            self._handle(HostDraining(host))
        for host, count in slots.items():
            if self._slots.get(host) != count:
                self._handle(HostFound(host, count))
        self._slots = dict(slots)
        self._handle(Tick())  # A job without any host waits for no longer than the elastic timeout.

    def leaves_in(self, seconds: float, host: str) -> None:
        """``host`` drains, and will be gone in so many seconds; the last call counts."""
        self._handle(HostDraining(host, self._clock() + seconds))

    def host_lost(self, host: str, text: str, has_returned: Callable[[str], bool] = lambda worker: False) -> None:
        """``host`` is gone, with its workers; those that ``has_returned`` names have done their work before."""
        self._slots.pop(host, None)
        lost = [worker for worker, place in self._places.items() if place == host]
        for worker in lost:
            if self._membership.has(worker) and has_returned(worker):
                self.done(worker, "returned")
            else:
                self._lose_with_host(worker, text)
        self._coming_up.difference_update(lost)
        self._handle(HostLost(host, text))

    def _lose_with_host(self, worker: str, text: str) -> None:
        """Nobody will say how ``worker`` ended, if it has not ended before."""
        failure = Failure(FailureKind.EXIT, f"was lost ({text})")
        self._lost[worker] = text
        if self._failures.of(worker) is ENDED:
            self._failures.explain(worker, failure)
            self._settle(worker)
        elif not self.is_over and not self._membership.has_left(worker):
            self._failures.add(worker, self._rank_of(worker), failure)

    def host_unusable(self, host: str, text: str | None) -> None:
        """The job wants ``host``, but cannot use it, for the reason ``text``; None: it does not want it any more."""
        self._handle(HostUnusable(host, text))

    def up(self, worker: str) -> None:
        """``worker`` came up."""
        self._coming_up.discard(worker)

    def limit_slots(self, host: str, count: int) -> None:
        """``host`` has no more than ``count`` slots until :meth:`found` says otherwise."""
        if self._slots.get(host, 0) > count:
            self._slots[host] = count
            self._handle(HostFound(host, count))

    def withdraw(self, worker: str, text: str) -> None:
        """``worker`` was never started, for the reason ``text``: no failure of it, nor of its host."""
        self._coming_up.discard(worker)
        if self._membership.has(worker):
            self._done[worker] = text
            self._handle(WorkerBehind(worker))

    def done(self, worker: str, text: str = "ended with exit code 0") -> None:
        """``worker`` has ended with success; ``text`` says how. It may be that the others noticed its end first."""
        self._note_end(worker, text)
        self._coming_up.discard(worker)
        if self._failures.of(worker) is ENDED:
            self._acquit(worker, text)
        elif worker in self.members and worker not in self._former:
            self._order = self._order or self.members
            self._done[worker] = text
        self._handle(WorkerDone(worker))

    def _acquit(self, worker: str, text: str) -> None:
        """``worker`` is not lost, as the others took it: without :func:`shutdown` they cannot know."""
        self._lost.pop(worker, None)
        self._done[worker] = text
        self._failures.forget(worker)
        self._settle(worker)

    def failed(self, worker: str, failure: Failure) -> None:
        """``worker`` has ended without success; that of a worker that has left is no failure.

        Ignored once the driver ends the workers itself, unless it says more of the cause. Of several failures of one
        worker the first one counts; in a static job, where they are reports of one end, the likeliest one.
        """
        failure = self._on_trial(worker, self._failures.with_exception(worker, failure))
        if self._failures.of(worker) is ENDED and not self._is_ending:
            self._explain(worker, failure)
        is_known = self._failures.of(worker) is not None
        if self._is_ending:
            if worker == self._blamed and failure.kind is FailureKind.EXCEPTION:
                self._failures.explain(worker, failure)
            return
        self._note_end(worker, failure.text)
        if is_known:
            if not self._limits.is_elastic:
                self._failures.improve(worker, failure)
            return
        if worker in self._former and self._membership.has_left(worker):
            self.done(worker)
            return
        self._coming_up.discard(worker)
        self._lost[worker] = failure.text
        self._failures.add(worker, self._rank_of(worker), failure)
        self._give_up(worker, failure)
        has_raised = failure.kind is FailureKind.EXCEPTION and worker not in self._former
        self._handle(WorkerRaised(worker, failure.text) if has_raised else _failed(worker, failure))
        if self._end is not None:
            self._end_within(self._patience.seconds(failure.kind))

    def _on_trial(self, worker: str, failure: Failure) -> Failure:
        """``failure``; an exception of a worker that never trained, while others did, does not end the job."""
        if failure.kind is not FailureKind.EXCEPTION or not self._membership.is_on_trial(worker):
            return failure
        return replace(failure, kind=FailureKind.EXIT, error=None)

    def _give_up(self, worker: str, failure: Failure) -> None:
        """End a newcomer that failed: it may have a process still. Nothing else tells of it while the others go on."""
        if self.is_over or worker in self._former or not self._membership.is_on_trial(worker):
            return
        self._agents.kill(worker)
        if failure is ENDED:
            self._untold.append(lambda: self._tell_given_up(worker, self._failures.of(worker)))
        else:
            self._tell_given_up(worker, failure)

    def _tell_given_up(self, worker: str, failure: Failure | None) -> None:
        if failure is None:  # it has ended with success, which came to light later
            return
        text = f"{worker} on host {self._hosts[worker]} failed before it could train; the others go on: it "
        logger.warning(with_last_lines(f"{text}{failure.text}", failure.last_lines))

    def _note_end(self, worker: str, text: str) -> None:
        if self._notes is not None and worker in self._ranked:
            self._notes.leave(self._ranked[worker].rank, self._hosts[worker], text)

    def _explain(self, worker: str, failure: Failure) -> None:
        """How ``worker`` ended, which was lost already."""
        self._lost[worker] = failure.text
        self._failures.explain(worker, failure)
        self._settle(worker)
        has_raised = failure.kind is FailureKind.EXCEPTION
        self._handle(WorkerRaised(worker, failure.text) if has_raised else _failed(worker, failure))

    def _settle(self, worker: str) -> None:
        """Nothing more will be known of the end of ``worker``."""
        self._unexplained.discard(worker)
        while self._untold and not self._unexplained:
            self._untold.pop(0)()

    # The end.

    @property
    def is_over(self) -> bool:
        """Whether no further worker will be started."""
        return self._end is not None

    @property
    def has_cause(self) -> bool:
        """Whether a worker failed by itself, and not because of another one."""
        return self._failures.has_cause

    @property
    def has_formed(self) -> bool:
        """Whether workers have the state of the training."""
        return self._report_formed is not None

    @property
    def is_ending(self) -> bool:
        """Whether the driver ends the workers."""
        return self._is_ending

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of the world that was published last."""
        return tuple(worker for worker, _ in self._published.workers)

    def host_of(self, worker: str) -> str:
        """The host that ``worker`` was started on."""
        return self._hosts[worker]

    @property
    def order(self) -> tuple[str, ...]:
        """The workers in the order of their ranks in the world of the first one that was done."""
        return self._order

    def close(self) -> None:
        """Take no more reports of workers; those of a later driver may start again.

        Workers that are asked to end now have nobody to hand over to, so they hear that a job that is not over ends.
        """
        self._unsubscribe()
        if not self.is_over:
            self._publish_end("its driver ends")
        if self._notes is not None:
            self._notes.withdraw()
        for worker in list(self._unexplained):
            self._settle(worker)

    def check(self) -> None:
        """Raise the cause of a failed job: an exception of the user's code as itself, otherwise a WorkerError."""
        if self._timeout is not None:
            raise self._timeout
        if self._end is None or self._end.error is None:
            return
        if not self._failures:
            raise ExecutorError(self._end.error)
        cause = self._failures.cause
        if self._limits.is_elastic and cause.failure.kind is not FailureKind.EXCEPTION and not self._end.unrepaired:
            raise self._error(self._failures.last or cause, self._end.error)
        raise cause.failure.error or self._error(cause)

    def _error(self, failed: FailedWorker, text: str = "") -> WorkerError:
        host, failure = self._hosts[failed.worker], failed.failure
        rank = number_of(failed.worker) if failed.rank is None else failed.rank
        text = text or f"rank {rank} on {host} {failure.text}"
        return WorkerError(text, rank, host, failure.exit_code, failure.last_lines)

    def _end_within(self, seconds: float) -> None:
        if seconds > 0:
            self._agents.after(seconds, self._end_workers)
        else:
            self._end_workers()

    def _end_workers(self) -> None:
        if not self._is_ending:
            self._blame()
            self._is_ending = True
            self._agents.end(self._failures.cause.worker if self._failures else None)

    def _blame(self) -> None:
        """A rank that raised may run its exit handlers for long. The others name it, and have ended because of it."""
        rank, text = self._failures.raised_elsewhere or (None, "")
        worker = None if rank is None or self._limits.is_elastic else self._published.worker_of(rank)
        if worker is not None and self._membership.has(worker):
            self._blamed = worker
            self._failures.add(
                worker, rank, Failure(FailureKind.EXCEPTION, f"{text}, and its process has not ended yet")
            )

    # Actions.

    def _handle(self, event: Event) -> None:
        actions = self._membership.handle(event, self._clock())
        self._publish(actions)
        for action in actions:
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, StopWorker):
                self._former.add(action.worker)
                self._agents.stop(action.worker)
            elif isinstance(action, Overdue):
                self._warn(action)
            elif isinstance(action, End):
                self._finish(action)
        if self._membership.deadline is not None:
            self._agents.after(self._membership.deadline - self._clock(), self._tick)

    def _warn(self, overdue: Overdue) -> None:
        """Tell who has come to no commit in the time that a notice gave."""
        ranks = {worker: self._formed_last.rank_of(worker) for worker in overdue.workers}
        logger.warning(
            "%s on host %s came to no commit since the notice that the host will be gone at %s; the others %s",
            ", ".join(worker if rank is None else f"rank {rank}" for worker, rank in ranks.items()),
            overdue.host,
            time.strftime("%X", time.localtime(time.time() + overdue.until - self._clock())),
            GO_ON if overdue.go_on else STAY,
        )

    def _tick(self) -> None:
        deadline = self._membership.deadline
        if deadline is not None and deadline <= self._clock():
            self._handle(Tick())

    def _publish(self, actions: list[Action]) -> None:
        """Publish worlds before their workers start. A static job has one world, also when some workers are done."""
        starts = [action for action in actions if isinstance(action, Start)]
        self._hosts |= {action.worker: self._machine(action.host) for action in starts}
        self._places |= {action.worker: action.host for action in starts}
        for action in actions:
            if isinstance(action, Publish) and (self._limits.is_elastic or self._published is NO_WORLD):
                members = tuple((worker, self._hosts[worker]) for worker in action.members.workers)
                world = Published(action.members.round, members, action.planned)
                text = describe(self._formed_last, world, self._lost, self._done)
                self._show(Published(world.round, members, action.planned, text))

    def _show(self, world: Published) -> None:
        self._former = (self._former | set(self.members)) - {worker for worker, _ in world.workers}
        self._published = world
        self._ranked = world.slots()
        self._present = {**(self._present if world.planned else {}), world.round: world}
        self._formed_last = world if self._formed_last is NO_WORLD else self._formed_last
        if self._limits.is_elastic:
            logger.debug("world %d: %s", world.round, world.text)
            self._job.store.set(world_key(world.round), world.encode())

    def _start(self, action: Start) -> None:
        self._coming_up.add(action.worker)
        self._agents.after(self._start_timeout, lambda: self._check_up(action.worker))
        self._agents.start(action.worker, action.host, self._environment(action.worker, self._hosts[action.worker]))

    def _environment(self, worker: str, host: str) -> dict[str, str]:
        """The place of ``worker``: that of a newcomer is the one it would have if it joined now."""
        is_newcomer = worker not in self._ranked
        joined = Published(-1, (*self._published.workers, (worker, host)))
        slot = joined.slots()[worker] if is_newcomer else self._ranked[worker]
        course = Course() if is_newcomer else self._job.course
        place = environment_of(slot, self._job.host, self._job.port, self._job.secret, course)
        if not self._limits.is_elastic:
            return place
        identity = WorkerIdentity(worker, self._published.round, is_newcomer)
        return {**place, **identity.variables(), "HOROVOD_ELASTIC_TIMEOUT": str(self._limits.timeout)}

    def _check_up(self, worker: str) -> None:
        if worker not in self._coming_up or self._is_ending:
            return
        if self._withdraws(worker):
            return
        if self._limits.is_elastic:
            self._agents.kill(worker)
            text = f"did not come up within {self._start_timeout:g} s"
            self.failed(worker, Failure(FailureKind.EXIT, text, has_begun=False))
            return
        missing = ", ".join(sorted(map(str, map(number_of, self._coming_up))))
        self._timeout = StartTimeoutError(
            f"of {self._limits.size} ranks on {', '.join(self._slots)}, these did not come up within "
            f"{self._start_timeout:g} s: {missing}; raise the start timeout if this host is slow "
            "(start_timeout, --start-timeout or HOROVOD_START_TIMEOUT)"
        )
        self._end = self._end or End(str(self._timeout))
        self._end_workers()

    def _finish(self, end: End) -> None:
        self._end = end
        self._failures.end(end.unrepaired)
        text = str(self._error(self._failures.cause)) if end.unrepaired else end.error
        self._publish_end(text or "the job is done")
        if end.error is None:
            self._is_ending = True
            # Newcomers that are on their way, and former workers that do not end by themselves.
            self._agents.after(CAUSE_SECONDS, self._agents.end)
        else:
            self._end_within(self._patience.seconds(self._failures.cause.failure.kind) if self._failures else 0.0)

    def _publish_end(self, text: str) -> None:
        if self._limits.is_elastic:
            over = Published(self._published.round + 1, text=text, is_over=True)
            self._job.store.set(world_key(over.round), over.encode())

    # Reports of workers.

    def _note_key(self, key: str) -> None:
        """In the thread of the rendezvous server."""
        if key.startswith(REPORTS):
            self._agents.soon(lambda: self._take(key))

    def _take(self, key: str) -> None:
        worker = key.removeprefix(REPORTS).partition("/")[0]
        if worker not in self._hosts or self.is_over:
            return
        sent = self._job.take(key)
        if sent is None:
            return
        report = Report.decode(sent)
        answer = self._answer(worker).get(report.kind)
        if answer is not None:
            answer(report)

    def _answer(self, worker: str) -> dict[str, Callable[[Report], None]]:
        return {
            "ready": lambda report: self._ready(worker, report),
            "raised": lambda report: self._raised(worker, report),
            "draining": lambda report: self._drain(worker),
            "behind": lambda report: self._leave_behind(worker),
            "leaving": lambda report: self._leave(worker),
            "failed": lambda report: self._cut_off(worker, report),
            "lost": self._lose,
            "formed": self._formed,
            "returned": lambda report: self._note_stage(report.call, report.round, has_returned=True),
        }

    def _ready(self, worker: str, report: Report) -> None:
        """A newcomer that cannot share the state of the ranks would break their world."""
        text = objection(report, self._report_formed)
        if text is None:
            self._handle(WorkerReady(worker))
            return
        self.failed(worker, Failure(FailureKind.EXIT, text))

    def _raised(self, worker: str, report: Report) -> None:
        self._failures.note_exception(worker, report.text)
        if report.is_uncaught:
            self._agents.after(UNCAUGHT_SECONDS, lambda: self._fail_uncaught(worker, report.text))

    def _fail_uncaught(self, worker: str, text: str) -> None:
        """The others wait for ``worker``, whose process may have a thread that never ends."""
        if self._membership.has(worker) and not self.is_over:
            how = f"raised {text}, and did not end within {UNCAUGHT_SECONDS:g} s: it may have a non-daemon thread"
            self.failed(worker, Failure(FailureKind.EXCEPTION, how))

    def _drain(self, worker: str) -> None:
        logger.info("%s was asked to end; it leaves at one of its next commits", self._place(worker))
        self._handle(WorkerDraining(worker))

    def _leave_behind(self, worker: str) -> None:
        """The others do not wait for ``worker``, which ends by itself."""
        logger.info("%s leaves: the other ranks are not in its call of elastic functions", self._place(worker))
        self._former.add(worker)
        self._handle(WorkerBehind(worker))

    def _leave(self, worker: str) -> None:
        """``worker`` has heard of a world without it, and ends, also if a later world has it again."""
        self._former.add(worker)
        self._handle(WorkerLeaves(worker))

    def _rank_of(self, worker: str) -> int | None:
        """The rank that ``worker`` has had itself: it may never enter the world that was published last."""
        rank = self._formed_last.rank_of(worker)
        return self._published.rank_of(worker) if rank is None else rank

    def _place(self, worker: str) -> str:
        rank = self._published.rank_of(worker)
        return f"{worker if rank is None else f'rank {rank}'} on host {self._hosts[worker]}"

    def _formed(self, report: Report) -> None:
        self._present = {round: world for round, world in self._present.items() if round >= report.round}
        self._report_formed = report
        self._note_stage(report.call, report.round)
        if report.round == self._published.round:
            if self._formed_last is not self._published:  # the ranks also agree at the beginning of each call
                self._untold.append(partial(self._tell, self._formed_last, self._published, report))
            for worker in self._unexplained:
                self._agents.after(CAUSE_SECONDS, partial(self._settle, worker))
            self._settle("")
            self._formed_last = self._published
        self._handle(WorldFormed(report.round))

    def _note_stage(self, call: int, round: int = 0, has_returned: bool = False) -> None:
        """Reports of one worker may overtake each other. If rank 0 returns early, the others go on in a later world."""
        stage = call, round, has_returned
        if stage > self._stage:
            self._stage = stage
            self._job.store.set(CALL, WorldCall(call, has_returned).encode())

    def _tell(self, before: Published, world: Published, report: Report) -> None:
        text = describe(before, world, self._lost, self._done)
        # A script that sets up no log shows warnings, but no more.
        level = logging.WARNING if losses(before, world, self._lost) else logging.INFO
        line = summary(replace(world, text=text), report.pause, report.lost)
        self._job.store.set(change_key(world.round), line.encode())
        logger.log(level, line)

    def _cut_off(self, worker: str, report: Report) -> None:
        """Newcomers that the ranks need may wait for this call."""
        self._note_stage(report.call)
        self._agents.after(ACCUSED_SECONDS, lambda: self._judge(worker, report))

    def _lose(self, report: Report) -> None:
        """Go on without workers that have ended; their agents will say how. A job that may end waits for that."""
        lost = [worker for worker in self.members if self._published.rank_of(worker) in report.ranks]
        has_raised = any(map(self._failures.has_exception, lost))
        is_short = len(self.members) - len(lost) < self._limits.least
        is_bounded = self._limits.resets is not None or self._limits.failures is not None
        may_end = is_bounded or is_short or has_raised
        if report.round != self._published.round or may_end:
            return
        for worker in lost:
            self.failed(worker, ENDED)
            self._unexplained.add(worker)
            self._agents.after(UNEXPLAINED_SECONDS, partial(self._give_up_reason, worker))

    def _give_up_reason(self, worker: str) -> None:
        """The others have noticed the end of ``worker`` long ago, but its process has not ended."""
        if self._failures.of(worker) is ENDED and not self.is_over:
            self._agents.kill(worker)
            self._explain(worker, replace(ENDED, text=f"{ENDED.text} for the others, but not its process"))

    def _judge(self, accuser: str, report: Report) -> None:
        """End the workers that others have lost, unless the present world is without them.

        They may have been lost in a world whose successor, with them, was already planned.
        """
        world = self._present.get(report.round)
        if self.is_over:
            return
        if world is None:
            self._dismiss(accuser)
            return
        accused = ({world.worker_of(rank) for rank in report.ranks} - {accuser}) & set(self.members)
        for worker in sorted(filter(None, accused)):
            self._agents.kill(worker)
            self.failed(worker, Failure(FailureKind.EXIT, "no longer answered"))
        if not accused:
            self._handle(WorldFailed(report.round, report.text))

    def _dismiss(self, worker: str) -> None:
        """End a ``worker`` that a later world was formed without: it may wait for a world that never comes."""
        if worker in self._former:
            self._agents.kill(worker)


def _failed(worker: str, failure: Failure) -> WorkerFailed:
    return WorkerFailed(worker, failure.text, failure is not ENDED, failure.has_begun)
