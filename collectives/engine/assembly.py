"""Puts the parts of an engine together: the only place that knows all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from collectives.api import HOST, PATIENCE_SECONDS, Parameters, Topology
from collectives.backends.registry import staged
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import (
    COORDINATOR,
    Abort,
    Left,
    Locate,
    Ping,
    Refuse,
    Run,
    Status,
    Stop,
    Unknown,
    Withdraw,
)
from collectives.controller.process_sets import GLOBAL, ProcessSets
from collectives.controller.worker import Worker
from collectives.cores import Cores
from collectives.engine.bypass import Bypass
from collectives.engine.coordinator_link import LocalLink
from collectives.engine.counters import Counters
from collectives.engine.link import Link, RemoteLink
from collectives.engine.loop import Dispatch, EngineLoop, VoteDuties, WaitDuties
from collectives.engine.negotiation import Negotiation
from collectives.engine.progress import ProgressEngine
from collectives.engine.registration import SetBackends
from collectives.engine.runner import Runner
from collectives.engine.shutdown import Ends
from collectives.engine.threads import Callers, CommandQueue, DrivingThread, Waiters
from collectives.engine.work_table import WorkTable
from collectives.events import EventStream
from collectives.net.channel import Channel
from collectives.settings import Settings
from collectives.stalls.deadlocks import DeadlockDetector
from collectives.stalls.inspector import StallInspector, StallReporter, StatusRequest
from collectives.stalls.stacks import states_of
from collectives.stalls.status import StatusProbe, StatusTable
from collectives.stalls.straggler_reports import StragglerReporter
from collectives.stalls.stragglers import StragglerInspector, WaitWindows
from collectives.stalls.watchdog import CoordinatorWatch, Watchdog

CYCLE_SECONDS = 0.001


class Assembly:
    """The parts of an engine, each of which knows only those that are made before it.

    The threads of the channel, the backends and the devices reach the engine through ``ends`` and ``queue``.
    :meth:`start` must be called once, when the engine is ready.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        process_sets: ProcessSets,
        channel: Channel,
        backends: Mapping[int, SetBackends],
        events: EventStream,
    ) -> None:
        timeouts, rank, everywhere = settings.timeouts, topology.rank, backends[GLOBAL]
        parameters = _parameters(topology, settings)
        # Parts that the threads share.
        self.queue, self.callers = CommandQueue(channel), Callers()
        self.waiters, driving, dispatch = Waiters(), DrivingThread(), Dispatch()
        # Why ranks wait, and the link to the coordinator.
        self.statuses = statuses = StatusTable(channel.leaders)
        self.stragglers = StragglerReporter(
            StragglerInspector(topology.size, process_sets.members), events, topology.hosts
        )
        stalls = _stall_reporter(topology, settings, statuses, channel, events)
        self.link = _link(topology, settings, process_sets, channel, parameters, statuses, self.stragglers, events)
        # Parts that decide the next tensors, and run them.
        self.counters = Counters(WaitWindows(topology.size), self.link.report_waits)
        self.works, self.worker = WorkTable(rank, self.queue), Worker(parameters)
        self.runner = Runner(
            rank, process_sets, backends, self.works, events, self.counters, self.waiters, self.queue, parameters
        )
        bypass = Bypass(everywhere.vote, everywhere.by_device[HOST], self.worker, self.link, self.works, self.runner)
        negotiation = Negotiation(self.worker, self.link, bypass, self.runner)
        watch = CoordinatorWatch(
            topology,
            Watchdog(_stall_inspector(settings), self.works.oldest),
            stalls,
            self.works,
            self.link.inquire,
            lambda: channel.silent_rank,
            self.link.states,
        )
        self.ends = Ends(
            topology,
            timeouts,
            channel,
            self.link,
            bypass,
            negotiation,
            self.works,
            self.runner,
            self.queue,
            self.waiters,
            watch,
        )
        probe = StatusProbe(rank, self.works, self.callers.ever, self.worker, self.link.answer, self.queue.answer)
        # Parts that drive these.
        duties = WaitDuties(self.link, dispatch, watch, probe, driving, self.ends)
        self.runner.attend(duties.wait)
        vote_duties = VoteDuties(topology, channel, stalls, self.ends, self.queue, duties)
        self.loop = EngineLoop(
            timeouts,
            channel,
            self.link,
            self.worker,
            bypass,
            negotiation,
            dispatch,
            self.works,
            self.runner,
            vote_duties,
            duties,
            self.ends,
            self.queue,
        )
        _fill(dispatch, negotiation, bypass, watch, self.link, probe, self.loop)
        name, crowded = f"hvd-engine-{rank}", Cores.of(topology).are_crowded
        self.progress = ProgressEngine(
            self.loop, self.queue, driving, self.waiters, name, crowded, settings.thread_affinity
        )
        self._channel, self._backends = channel, everywhere.by_device.values()

    def start(self) -> None:
        """Watch the connections and the processes, and start the communication thread."""
        self._channel.watch(self.ends.lose)
        for backend in self._backends:
            backend.watch(partial(self.ends.lose, has_ended=True))
        self.progress.start()


def _fill(
    dispatch: Dispatch,
    negotiation: Negotiation,
    bypass: Bypass,
    watch: CoordinatorWatch,
    link: Link,
    probe: StatusProbe,
    loop: EngineLoop,
) -> None:
    """The handlers of all messages that a rank may get from the coordinator, or the coordinator's rank from it."""
    on = dispatch.on
    on(Run, negotiation.run)
    on(Refuse, negotiation.refuse)
    on(Unknown, negotiation.resend)
    on(Withdraw, bypass.withdraw)
    on(Status, watch.hear)
    on(Ping, link.pong)
    on(Locate, probe.locate)
    on(Stop, loop.stop)
    on(Left, loop.ends.all_left)
    on(Abort, loop.ends.hear)


def _link(
    topology: Topology,
    settings: Settings,
    process_sets: ProcessSets,
    channel: Channel,
    parameters: Parameters,
    statuses: StatusTable,
    stragglers: StragglerReporter,
    events: EventStream,
) -> Link:
    if topology.rank != COORDINATOR:
        return RemoteLink(channel, events)
    coordinator = Coordinator(process_sets.copy(), parameters, isolate_groups=not settings.group_fusion)
    stalls = _stall_reporter(topology, settings, statuses, channel, events)
    hosts, variable = topology.hosts, settings.operation_limit
    return LocalLink(
        channel, coordinator, stalls, DeadlockDetector(statuses), stragglers, statuses, events, hosts, variable
    )


def _stall_reporter(
    topology: Topology, settings: Settings, statuses: StatusTable, channel: Channel, events: EventStream
) -> StallReporter:
    inspector = _stall_inspector(settings)
    if topology.rank != COORDINATOR:
        return StallReporter(inspector, events)
    return StallReporter(inspector, events, StatusRequest(statuses, partial(states_of, channel)))


def _is_patient(topology: Topology, settings: Settings) -> bool:
    """Whether all ranks are on this host, leave no core to the communication threads, and no cycle time is set.

    Between hosts, data travels without use of the cores.
    """
    alone = topology.local_size >= topology.size
    return alone and settings.cycle_time is None and Cores.of(topology).are_scarce


def _parameters(topology: Topology, settings: Settings) -> Parameters:
    """The parameters from the settings of this rank; those of rank 0 hold from the first batch on."""
    patient, cycle_time = _is_patient(topology, settings), settings.cycle_time
    if cycle_time is None:
        cycle_time = PATIENCE_SECONDS if patient else CYCLE_SECONDS
    return Parameters(
        fusion_threshold=settings.fusion_threshold,
        cycle_time=cycle_time,
        patient=patient,
        patience=PATIENCE_SECONDS,
        cache_capacity=settings.cache_capacity,
        **staged(settings),
    )


def _stall_inspector(settings: Settings) -> StallInspector | None:
    if settings.stall_warning is None:
        return None
    return StallInspector(settings.stall_warning, settings.stall_shutdown)
