"""The worlds of this process in an elastic job, one after the other."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial

from collectives import (
    LOOPBACK,
    VERSION,
    CollectiveTimeoutError,
    ConnectAttempt,
    Engine,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    NoDescriptorError,
    PeerLostError,
    RendezvousClient,
    Settings,
    ShutDownError,
    Topology,
    World,
    registry,
)
from executors import PATIENCE_SECONDS, Answer, Member, Published, Report, WorkerIdentity, WorldCall

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 600.0
# A job that waits too long for workers is ended by its driver; this wait is a little longer.
DRIVER_SECONDS = 30.0
# The driver hears of the end of a process as soon as the other ranks. Only if it does not, they tell it.
SOON_SECONDS = 0.1
# For reports of a process that is about to end.
ONCE = 0.0
# An exception may have the whole of a tensor in its text.
LONGEST_TEXT = 1000

Connect = Callable[[World, ConnectAttempt | None], Engine]
EngineNow = Callable[[], Engine | None]


class RemovedError(Exception):
    """The next world is without this process, which shall end."""


class SupersededError(HorovodInternalError):
    """The driver has published another world while this process was connecting."""


class Worlds:
    """The present world of this process, and the next ones, as the driver of the job publishes them.

    ``place`` are the numbers that a newcomer expects, while it is alone; None later. ``engine`` returns the engine that
    runs. ``is_abandoned``: whether a notice did not reach the driver. Owns a :class:`.Member`, whose thread ends with
    the job or the process.
    """

    def __init__(
        self, identity: WorkerIdentity, world: World, client: RendezvousClient, seconds: float, engine: EngineNow
    ) -> None:
        self.identity = identity
        self.is_alone = identity.is_newcomer
        self.place: Topology | None = world.topology if identity.is_newcomer else None
        self.round = identity.round
        self._job = world.job
        self._rendezvous = world.rendezvous or ("", 0)
        self._seconds = seconds
        self._timeout = DEFAULT_TIMEOUT_SECONDS
        self._engine = engine
        self._attempt: tuple[ConnectAttempt, int] | None = None
        self._has_notice = False
        self._told = -1  # the round of the last loss that was reported
        self._is_first = False  # whether a newcomer is on its way to its first world
        self.is_abandoned = False
        self.call = 0  # the number of the elastic function that this process has called last
        self._has_told = False  # whether the driver knows of an exception of the user
        self._reports: set[threading.Thread] = set()  # those that send one
        self._client = client
        self._host = world.host
        self._member = Member(client, identity, self._hear)
        self._member.start()

    @classmethod
    def of(cls, environment: Mapping[str, str], world: World, settings: Settings, engine: EngineNow) -> Worlds | None:
        """Those of a worker with ``environment``, which has ``world`` first; None if its job is not elastic."""
        identity = WorkerIdentity.of(environment)
        if identity is None or world.rendezvous is None:
            return None
        if world.rendezvous[0] != LOOPBACK:  # ranks of other hosts may join
            from collectives import registry

            registry.preload(settings)
        client = RendezvousClient(*world.rendezvous, settings.secret, settings.timeouts.connect)
        client.share_reads(world.host, world.topology.size)
        worlds = cls(identity, world, client, settings.timeouts.connect, engine)
        worlds._timeout = float(environment.get("HOROVOD_ELASTIC_TIMEOUT", DEFAULT_TIMEOUT_SECONDS))
        return worlds

    @property
    def is_over(self) -> bool:
        """Whether the driver has ended the job."""
        return self._member.is_over

    @property
    def reason(self) -> str:
        """How the ranks of the present world differ from those before; empty if that is not known."""
        present = self._member.world_of(self.round)
        return "" if present is None else present.text

    # Connecting.

    def connect(self, world: World, connect: Connect) -> Engine:
        """The engine of this process in ``world``, or in a later one that replaces it meanwhile.

        A newcomer gets an engine without other ranks. Raises RemovedError if the later world is without this process,
        ShutDownError if the job is over, and what ``connect`` raises that is no HorovodInternalError.
        """
        if self.is_alone:
            return connect(_alone(world), None)
        while True:
            try:
                return self._connect_once(world, connect)
            except MismatchError:
                raise
            except HorovodInternalError as error:
                world = self._instead_of(world, error)

    def _connect_once(self, world: World, connect: Connect) -> Engine:
        self.round = world.round
        with ConnectAttempt(self._seconds) as attempt:
            self._attempt = attempt, world.round
            try:
                self._abort_if_superseded(self._member.newest())
                return connect(world, attempt)
            finally:
                self._attempt = None

    def _instead_of(self, world: World, error: HorovodInternalError) -> World:
        """The world to try after ``error``: the next one, or the same one if the other ranks may still come.

        A newcomer waits until they have finished a step. They come together, so one that is late does not come.
        """
        if isinstance(error, NoDescriptorError):
            return self._without_this(world, error)
        newest = self._member.newest()
        is_newest = newest is None or newest.round <= world.round
        if is_newest and self._is_first and isinstance(error, CollectiveTimeoutError):
            logger.info("round %d: the other ranks still finish a step; %s", world.round, error)
            return world
        return self.after(error)

    def _without_this(self, world: World, error: NoDescriptorError) -> World:
        """Leave the job to the others: no later world could have this process. Raises as :meth:`after`."""
        logger.error("%s leaves the job: %s", self.identity.worker, error)
        self._member.report(Report("unable", world.round, text=str(error)))
        return self._world(self._wait(lambda published: published.round > world.round))

    def entered(self) -> None:
        """The engine of this process runs, in the world of ``round``."""
        newest, engine = self._member.newest(), self._engine()
        self._is_first = False
        if engine is not None:
            engine.on_death(partial(self._report_lost, self.round))
        if newest is not None and not self.is_alone:
            self._react(newest)

    def formed(self) -> None:
        """All ranks of the present world have the state: the worlds before it do not matter any more."""
        self._member.forget_before(self.round)

    # The next world.

    def check(self, engine: Engine) -> None:
        """Raise HostsUpdatedInterrupt if the ranks leave the present world after this step."""
        due = engine.parameters.next_round
        if engine.topology.size == 1:
            newest = self._member.newest()
            due = newest.round if newest is not None and not self.is_alone and not newest.is_over else 0
        if due > self.round:
            self._interrupt(due)

    def _interrupt(self, round: int) -> None:
        coming = self._wait(lambda world: world.round >= round)
        present = self._member.world_of(self.round)
        members = dict(present.workers) if present else {}
        raise HostsUpdatedInterrupt(skip_sync=all(worker in members for worker, _ in coming.workers))

    def begin_call(self) -> bool:
        """This process calls an elastic function. Returns whether the ranks of the job have left it behind.

        A newcomer finds itself there if its script has several of them. If the ranks have returned from this call, it
        waits here for the next one, for up to the elastic timeout, and raises ShutDownError if there is none. Also
        raises the errors of the store.
        """
        self.call += 1
        present = self._present_call().number if self.is_alone else 0
        if self.call == 1 < present:
            logger.warning(
                f"{self.identity.worker} joins the job in call {present} of elastic functions; here, the calls "
                "before it return None"
            )
        return self.call < present

    def _present_call(self) -> WorldCall:
        present = self._member.call()
        if present != WorldCall(self.call, has_returned=True):
            return present
        logger.warning(
            f"{self.identity.worker} waits for the next call of an elastic function: the ranks have returned from call "
            f"{self.call}"
        )
        try:
            present = self._member.call_after(present, self._timeout)
        except CollectiveTimeoutError as error:
            self.tell_behind()
            raise ShutDownError(f"{self.identity.worker} leaves the job: {error}") from error
        self._check_over(self._member.newest())
        return present

    def join(self, layout: str) -> World:
        """Say that this newcomer is ready; its first world, as soon as there is one. Raises as :meth:`after`.

        ``layout`` is a digest of that of its state.
        """
        registry.preload_common()  # from the report on, the others may wait for this process
        self._member.report(Report("ready", call=self.call, version=VERSION, layout=layout))
        worker = self.identity.worker
        published = self._wait(lambda world: worker in dict(world.workers))
        self._check_over(published)
        self.is_alone, self.place, self._is_first = False, None, True
        return self._world(published)

    def finish(self, number: int, last_report: str) -> Answer:
        """Tell the driver of end ``number`` of the training function here, and wait for its answer; see ``Report``.

        The engine is shut down. Raises the errors of the store.
        """
        return self._member.finish(Report("finished", self.round, text=last_report, call=number))

    def give_metrics(self, number: int, metrics: bytes) -> None:
        self._member.give_metrics(number, metrics)

    def metrics_of(self, worker: str, number: int) -> bytes:
        return self._member.metrics_of(worker, number)

    def world_from(self, round: int) -> World:
        """The newest world from ``round`` on. Raises as :meth:`after`."""
        return self._world(self._wait(lambda world: world.round >= round))

    def planned(self) -> World:
        """The world after a HostsUpdatedInterrupt. Raises as :meth:`after`."""
        return self.world_from(self.round + 1)

    def after(self, error: HorovodInternalError) -> World:
        """The world after ``error`` has ended the present one.

        Raises RemovedError if it is without this process, ShutDownError if the job is over, CollectiveTimeoutError if
        the driver publishes none.
        """
        if isinstance(error, PeerLostError) and error.has_ended:
            self._report_lost(self.round, error)
        try:
            return self._world(self._member.wait(self._replaces, SOON_SECONDS))
        except CollectiveTimeoutError:
            ranks = tuple(getattr(error, "ranks", ()))
            self._member.report(Report("failed", self.round, ranks, str(error), call=self.call))
        return self._world(self._wait(partial(self._is_without, self._workers_of(error))))

    def _replaces(self, world: Published) -> bool:
        """Whether ``world`` follows from the end of the present one. One that was planned before has the lost ranks."""
        return any(not each.planned for each in self._member.since(self.round) if each.round <= world.round)

    def _is_without(self, lost: Collection[str | None], world: Published) -> bool:
        """Whether this process can leave the present world for ``world`` after a loss.

        It waits if a planned ``world`` has one of the ``lost``: the driver replaces that world, and this process may be
        the only one with the state.
        """
        members = {name for name, _ in world.workers}
        return self._replaces(world) or (world.round > self.round and members.isdisjoint(lost))

    def _workers_of(self, error: HorovodInternalError) -> set[str | None]:
        """The other workers of the present world that ``error`` names."""
        present = self._member.world_of(self.round)
        ranks = getattr(error, "ranks", ())
        return {present.worker_of(rank) for rank in ranks if present} - {self.identity.worker}

    def _report_lost(self, round: int, error: PeerLostError) -> None:
        """Tell the driver, unless it knows: the agent of the lost worker notices its end later.

        The thread of an engine may come when this process is in a later world than that of ``round``, where other
        workers have the ranks of ``error``.
        """
        newest = self._member.newest()
        if self._told < round and (newest is None or newest.round <= round):
            self._told = round
            self.report_later(Report("lost", round, error.ranks, str(error)))

    def came_together(self, before: int) -> bool:
        """Whether all ranks of the present world come from that of round ``before``, and left it by plan."""
        present, earlier = self._member.world_of(self.round), self._member.world_of(before)
        if present is None or earlier is None:
            return False
        return present.planned and {name for name, _ in present.workers} <= {name for name, _ in earlier.workers}

    def report(self, report: Report) -> None:
        """Send ``report`` to the driver."""
        self._member.report(report)

    def report_later(self, report: Report) -> None:
        """Send ``report`` to the driver, without waiting for its answer. A failure is logged."""
        # Owner: none, it ends with the report, whose time the member bounds.
        thread = threading.Thread(target=self._send, args=(report,), name="hvd-report", daemon=True)
        self._reports.add(thread)
        thread.start()

    def _send(self, report: Report) -> None:
        try:
            self._try_report(report, PATIENCE_SECONDS)
        finally:
            self._reports.discard(threading.current_thread())

    def await_reports(self) -> None:
        """Return when the driver has all reports, or cannot be reached: this process may end soon.

        The driver would otherwise see the end first, and might not know that the ranks have gone on after a loss.
        """
        for thread in tuple(self._reports):
            thread.join()  # Bound: the patience of its report.

    def _try_report(self, report: Report, seconds: float = ONCE) -> None:
        try:
            self._member.report(report, seconds)
        except HorovodInternalError as error:
            logger.warning("%s could not report to the driver: %s", self.identity.worker, error)

    def give_notice(self) -> None:
        """This process was asked to end: tell the driver. If the job is over meanwhile, it is asked once more."""
        self._has_notice = True
        if not self.is_over:
            self._member.report(Report("draining"), ONCE)

    def tell_returned(self) -> None:
        """The ranks have returned from the call in which they are: newcomers shall wait for the next one."""
        self.report_later(Report("returned", self.round, call=self.call))

    def tell_behind(self) -> None:
        """The other ranks have left this process behind, which ends. A failure is logged."""
        self._try_report(Report("behind"))

    def tell_leaving(self) -> None:
        """This process leaves, because a world is without it. A failure is logged."""
        self._try_report(Report("leaving"), PATIENCE_SECONDS)

    def tell_exception(self, text: str, is_uncaught: bool = False) -> None:
        """The exception ``text`` of the user's code is on its way out of this process. A failure is logged."""
        self._has_told = True
        self._try_report(Report("raised", self.round, text=text[:LONGEST_TEXT], is_uncaught=is_uncaught))

    def forget_exception(self) -> None:
        """The user's code has caught the exception that the driver was told of, if there was one."""
        if self._has_told:
            self._has_told = False
            self._try_report(Report("raised", self.round))

    def _wait(self, is_wanted: Callable[[Published], bool]) -> Published:
        return self._member.wait(is_wanted, self._timeout + DRIVER_SECONDS)

    def _check_over(self, newest: Published | None) -> None:
        if newest is not None and newest.is_over:
            raise ShutDownError(f"the job is over: {newest.text}")

    def _world(self, published: Published) -> World:
        self._check_over(published)
        world = published.world(self.identity.worker, self._job, self._rendezvous)
        if world is None:
            raise RemovedError(f"world {published.round} is without {self.identity.worker}: {published.text}")
        return world

    # On the thread of the member.

    def _hear(self, world: Published) -> None:
        self._client.share_reads(self._host, len(world.workers))
        if world.is_over and self._has_notice:
            os.kill(os.getpid(), signal.SIGTERM)
        self._abort_if_superseded(world)
        self._react(world)

    def _abort_if_superseded(self, world: Published | None) -> None:
        attempt = self._attempt
        if world is None or attempt is None or world.round <= attempt[1]:
            return
        if not world.planned or world.is_over:
            attempt[0].abort(SupersededError(f"world {world.round} replaces world {attempt[1]}: {world.text}"))

    def _react(self, world: Published) -> None:
        """Let the engine of this process hear of ``world``: at once, or after a step of all ranks."""
        engine = self._engine()
        if engine is None or world.round <= self.round or self.is_alone or world.is_over:
            return
        if not world.planned:
            engine.abort(PeerLostError(f"world {self.round} has ended: {world.text}"))
        elif engine.topology.rank == 0:
            engine.propose(next_round=world.round)


def _alone(world: World) -> World:
    """The world of a newcomer, which no other rank is in."""
    return World(world.job, world.round, Topology(hosts=(), cores=0), world.host)
