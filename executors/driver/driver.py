"""The driver of a job: it executes what the membership decides, by the agents of an executor, and publishes worlds."""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from collectives import EndNotes
from executors.api import StartTimeoutError, number_of
from executors.driver.member import WorkerIdentity
from executors.failures import CAUSE_SECONDS, Failure, FailureKind, Patience, with_last_lines
from executors.job.job import Job
from executors.job.worlds import (
    CALL,
    REPORTS,
    Published,
    Report,
    WorldCall,
    WorldHistory,
    change_key,
    describe,
    losses,
    objection,
    summary,
    world_key,
)
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
    WorkerLeaves,
    WorkerReady,
    WorldFailed,
    WorldFormed,
)
from executors.membership.deaths import ENDED, STUCK, Deaths

logger = logging.getLogger(__name__)


class Agents(ABC):
    """Starts and ends workers, and runs the loop in which all calls to the driver are made.

    The agents report to the driver by its methods ``up``, ``done``, ``failed`` and ``host_lost``.
    """

    @abstractmethod
    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        """Start ``worker`` on ``host`` with ``environment``, which has its place in the job."""

    @abstractmethod
    def stop(self, worker: str) -> None:
        """Ask ``worker`` to end; it is killed if it does not."""

    @abstractmethod
    def kill(self, worker: str) -> None:
        """End ``worker`` at once: it may be stopped, or hang."""

    @abstractmethod
    def end(self, spare: str | None = None) -> None:
        """Ask all workers to end, and kill those that do not; ``spare`` is asked last."""

    @abstractmethod
    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` in the loop, ``seconds`` from now, unless the job is over before."""

    @abstractmethod
    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the loop; from any thread."""


# A worker that others accuse may have ended; for so long its agent may say how.
ACCUSED_SECONDS = 1.0
# An exception that nobody catches ends a process, after its handlers of atexit, unless one of its threads goes on.
UNCAUGHT_SECONDS = 5.0
# The agent says more as soon as the process has ended, which may have much memory to give back.
UNEXPLAINED_SECONDS = 60.0

GO_ON = "go on from the last commit"
STAY = "are too few to go on alone, and lose the host then"

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
        self._membership = Membership(limits, random.Random().random)
        self._deaths = Deaths(limits, self._membership)
        self._worlds = WorldHistory()
        self._slots: dict[str, int] = {}
        self._hosts: dict[str, str] = {}  # the machine of each worker
        self._places: dict[str, str] = {}  # its host, as the agents name it
        self._coming_up: set[str] = set()
        self._untold: list[Callable[[], None]] = []  # changes that are told when all ends are explained
        # The call of an elastic function in which the ranks are, their world, and whether they have returned from it.
        self._stage = 0, 0, False
        self._report_formed: Report | None = None  # the last one of rank 0
        self._timeout: StartTimeoutError | None = None
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
            verdict = self._deaths.agent_lost(worker, text, has_returned(worker), self._worlds.rank_of(worker))
            if verdict.is_done:
                self.done(worker, "returned")
            elif verdict.is_explained:
                self._settle(worker)
        self._coming_up.difference_update(lost)
        self._handle(HostLost(host, text))

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
            self._deaths.done[worker] = text
            self._handle(WorkerBehind(worker))

    def done(self, worker: str, text: str = "ended with exit code 0") -> None:
        """``worker`` has ended with success; ``text`` says how. It may be that the others noticed its end first."""
        self._note_end(worker, text)
        self._coming_up.discard(worker)
        if self._deaths.succeeded(worker, text, self.members):
            self._settle(worker)
        self._handle(WorkerDone(worker))

    def failed(self, worker: str, failure: Failure) -> None:
        """``worker`` has ended without success; see :meth:`Deaths.failed` for what that means.

        Ignored once the driver ends the workers itself, unless it says more of the cause.
        """
        verdict = self._deaths.failed(worker, failure, self._worlds.rank_of(worker))
        if self.is_ending:
            return
        self._note_end(worker, verdict.failure.text)
        if verdict.is_done:
            self.done(worker)
        if verdict.is_explained:
            self._settle(worker)
        if verdict.is_given_up:
            self._give_up(worker, verdict.failure)
        if verdict.is_new:
            self._coming_up.discard(worker)
        if verdict.event is not None:
            self._handle(verdict.event)
        if verdict.is_new and self.is_over:
            self._end_within(self._patience.seconds(verdict.failure.kind))

    def _give_up(self, worker: str, failure: Failure) -> None:
        """End a newcomer that failed: it may have a process still. Nothing else tells of it while the others go on."""
        self._agents.kill(worker)
        if failure is ENDED:
            self._untold.append(lambda: self._tell_given_up(worker, self._deaths.failures.of(worker)))
        else:
            self._tell_given_up(worker, failure)

    def _tell_given_up(self, worker: str, failure: Failure | None) -> None:
        if failure is None:  # it has ended with success, which came to light later
            return
        text = f"{worker} on host {self._hosts[worker]} failed before it could train; the others go on: it "
        logger.warning(with_last_lines(f"{text}{failure.text}", failure.last_lines))

    def _note_end(self, worker: str, text: str) -> None:
        if self._notes is not None and worker in self._worlds.slots:
            self._notes.leave(self._worlds.slots[worker].rank, self._hosts[worker], text)

    def _settle(self, worker: str) -> None:
        """Nothing more will be known of the end of ``worker``."""
        self._deaths.unexplained.discard(worker)
        while self._untold and not self._deaths.unexplained:
            self._untold.pop(0)()

    # The end.

    @property
    def is_over(self) -> bool:
        """Whether no further worker will be started."""
        return self._deaths.end is not None

    @property
    def has_cause(self) -> bool:
        """Whether a worker failed by itself, and not because of another one."""
        return self._deaths.failures.has_cause

    @property
    def has_formed(self) -> bool:
        """Whether workers have the state of the training."""
        return self._report_formed is not None

    @property
    def is_ending(self) -> bool:
        """Whether the driver ends the workers."""
        return self._deaths.is_ending

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of the world that was published last."""
        return self._worlds.members

    def host_of(self, worker: str) -> str:
        """The host that ``worker`` was started on."""
        return self._hosts[worker]

    @property
    def order(self) -> tuple[str, ...]:
        """The workers in the order of their ranks in the world of the first one that was done."""
        return self._deaths.order

    def close(self) -> None:
        """Take no more reports of workers; those of a later driver may start again.

        Workers that are asked to end now have nobody to hand over to, so they hear that a job that is not over ends.
        """
        self._unsubscribe()
        if not self.is_over:
            self._publish_end("its driver ends")
        if self._notes is not None:
            self._notes.withdraw()
        for worker in list(self._deaths.unexplained):
            self._settle(worker)

    def check(self) -> None:
        """Raise the cause of a failed job: an exception of the user's code as itself, otherwise a WorkerError."""
        if self._timeout is not None:
            raise self._timeout
        error = self._deaths.error(self._hosts)
        if error is not None:
            raise error

    def _end_within(self, seconds: float) -> None:
        if seconds > 0:
            self._agents.after(seconds, self._end_workers)
        else:
            self._end_workers()

    def _end_workers(self) -> None:
        if not self.is_ending:
            self._deaths.blame(self._worlds.published.worker_of)
            self._deaths.is_ending = True
            self._agents.end(self._deaths.failures.cause.worker if self._deaths.failures else None)

    # Actions.

    def _handle(self, event: Event) -> None:
        actions = self._membership.handle(event, self._clock())
        self._publish(actions)
        for action in actions:
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, StopWorker):
                self._deaths.former.add(action.worker)
                self._agents.stop(action.worker)
            elif isinstance(action, Overdue):
                self._warn(action)
            elif isinstance(action, End):
                self._finish(action)
        if self._membership.deadline is not None:
            self._agents.after(self._membership.deadline - self._clock(), self._tick)

    def _warn(self, overdue: Overdue) -> None:
        """Tell who has come to no commit in the time that a notice gave."""
        ranks = {worker: self._worlds.formed.rank_of(worker) for worker in overdue.workers}
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
            if isinstance(action, Publish) and (self._limits.is_elastic or not self._worlds.has_any):
                members = tuple((worker, self._hosts[worker]) for worker in action.members.workers)
                world = Published(action.members.round, members, action.planned)
                text = describe(self._worlds.formed, world, self._deaths.lost, self._deaths.done)
                self._show(replace(world, text=text))

    def _show(self, world: Published) -> None:
        self._deaths.published(self.members, [worker for worker, _ in world.workers])
        self._worlds.publish(world)
        if self._limits.is_elastic:
            logger.debug("world %d: %s", world.round, world.text)
            self._job.store.set(world_key(world.round), world.encode())

    def _start(self, action: Start) -> None:
        self._coming_up.add(action.worker)
        self._agents.after(self._start_timeout, lambda: self._check_up(action.worker))
        self._agents.start(action.worker, action.host, self._environment(action.worker, self._hosts[action.worker]))

    def _environment(self, worker: str, host: str) -> dict[str, str]:
        """The place of ``worker``: that of a newcomer is the one it would have if it joined now."""
        slot = self._worlds.slots.get(worker)
        is_newcomer = slot is None
        place = self._job.place(slot or self._worlds.published.slot_with(host), is_newcomer)
        if not self._limits.is_elastic:
            return place
        identity = WorkerIdentity(worker, self._worlds.published.round, is_newcomer)
        return {**place, **identity.variables(), "HOROVOD_ELASTIC_TIMEOUT": str(self._limits.timeout)}

    def _check_up(self, worker: str) -> None:
        if worker not in self._coming_up or self.is_ending:
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
        self._deaths.end = self._deaths.end or End(str(self._timeout))
        self._end_workers()

    def _finish(self, end: End) -> None:
        self._publish_end(self._deaths.over(end, self._hosts))
        if end.error is None:
            self._deaths.is_ending = True
            # Newcomers that are on their way, and former workers that do not end by themselves.
            self._agents.after(CAUSE_SECONDS, self._agents.end)
        else:
            failures = self._deaths.failures
            self._end_within(self._patience.seconds(failures.cause.failure.kind) if failures else 0.0)

    def _publish_end(self, text: str) -> None:
        if self._limits.is_elastic:
            over = Published(self._worlds.published.round + 1, text=text, is_over=True)
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
            "unable": lambda report: self._replace(worker, report),
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
        self._deaths.failures.note_exception(worker, report.text)
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
        self._deaths.former.add(worker)
        self._handle(WorkerBehind(worker))

    def _leave(self, worker: str) -> None:
        """``worker`` has heard of a world without it, and ends, also if a later world has it again."""
        self._deaths.former.add(worker)
        self._handle(WorkerLeaves(worker))

    def _place(self, worker: str) -> str:
        rank = self._worlds.published.rank_of(worker)
        return f"{worker if rank is None else f'rank {rank}'} on host {self._hosts[worker]}"

    def _formed(self, report: Report) -> None:
        self._report_formed = report
        self._note_stage(report.call, report.round)
        before, world = self._worlds.formed, self._worlds.published
        if self._worlds.note_formed(report.round):
            if before is not world:  # the ranks also agree at the beginning of each call
                self._untold.append(partial(self._tell, before, world, report))
            for worker in self._deaths.unexplained:
                self._agents.after(CAUSE_SECONDS, partial(self._settle, worker))
            self._settle("")
        self._handle(WorldFormed(report.round))

    def _note_stage(self, call: int, round: int = 0, has_returned: bool = False) -> None:
        """Reports of one worker may overtake each other. If rank 0 returns early, the others go on in a later world."""
        stage = call, round, has_returned
        if stage > self._stage:
            self._stage = stage
            self._job.store.set(CALL, WorldCall(call, has_returned).encode())

    def _tell(self, before: Published, world: Published, report: Report) -> None:
        text = describe(before, world, self._deaths.lost, self._deaths.done)
        # A script that sets up no log shows warnings, but no more.
        level = logging.WARNING if losses(before, world, self._deaths.lost) else logging.INFO
        line = summary(replace(world, text=text), report.pause, report.lost)
        self._job.store.set(change_key(world.round), line.encode())
        logger.log(level, line)

    def _cut_off(self, worker: str, report: Report) -> None:
        """Newcomers that the ranks need may wait for this call."""
        self._note_stage(report.call)
        self._agents.after(ACCUSED_SECONDS, lambda: self._judge(worker, report))

    def _replace(self, worker: str, report: Report) -> None:
        """The others go on without ``worker``."""
        self._agents.kill(worker)
        self.failed(worker, Failure(FailureKind.EXIT, f"could not connect: {report.text}"))

    def _lose(self, report: Report) -> None:
        """Go on without workers that have ended; their agents will say how. A job that may end waits for that."""
        world = self._worlds.published
        lost = world.workers_of(report.ranks)
        if report.round != world.round or self._deaths.may_end_job(lost, self.members):
            return
        for worker in lost:
            self.failed(worker, ENDED)
            self._deaths.unexplained.add(worker)
            self._agents.after(UNEXPLAINED_SECONDS, partial(self._give_up_reason, worker))

    def _give_up_reason(self, worker: str) -> None:
        """The others have noticed the end of ``worker`` long ago, but its process has not ended."""
        if self._deaths.is_unexplained(worker) and not self.is_over:
            self._agents.kill(worker)
            event = self._deaths.explain(worker, STUCK)
            self._settle(worker)
            self._handle(event)

    def _judge(self, accuser: str, report: Report) -> None:
        """End the workers that others have lost, or the accuser; see :meth:`Deaths.judge`."""
        if self.is_over:
            return
        world = self._worlds.present.get(report.round)
        accused = None if world is None else world.workers_of(report.ranks)
        judgement = self._deaths.judge(accuser, accused, self._worlds.slots)
        for worker in judgement.dead:
            self._agents.kill(worker)
            self.failed(worker, judgement.failure)
        for worker in judgement.dismissed:
            self._agents.kill(worker)
        if judgement.has_failed and report.round == self._worlds.published.round:
            self._handle(WorldFailed(report.round, report.text))
