"""Puts the parts of an engine together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from collectives.api import HOST, PATIENCE_SECONDS, Parameters, PeerLostError, Topology
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
from collectives.controller.waits import ProcessState
from collectives.controller.worker import Worker
from collectives.cores import Cores
from collectives.engine.bypass import Bypass
from collectives.engine.coordinator_link import LocalLink
from collectives.engine.counters import Counters, Counts
from collectives.engine.link import Link, RemoteLink
from collectives.engine.loop import Dispatch, EngineLoop, VoteDuties, WaitDuties
from collectives.engine.negotiation import Negotiation
from collectives.engine.progress import ProgressEngine
from collectives.engine.registration import SetBackends
from collectives.engine.runner import Runner
from collectives.engine.shutdown import Ends
from collectives.engine.work import Work
from collectives.engine.work_table import Commands, WorkTable
from collectives.events import EventStream
from collectives.net.channel import Channel
from collectives.settings import Settings
from collectives.stalls.deadlocks import DeadlockDetector
from collectives.stalls.inspector import StallInspector, StallReporter, StatusRequest
from collectives.stalls.status import StatusProbe, StatusTable
from collectives.stalls.straggler_reports import StragglerReporter
from collectives.stalls.stragglers import StragglerInspector, WaitWindows
from collectives.stalls.watchdog import CoordinatorWatch, Watchdog

CYCLE_SECONDS = 0.001


class Assembly:
    """The parts of an engine. A part reaches those that are made after it through the methods of this class.

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
        self._topology = topology
        self._settings = settings
        self._process_sets = process_sets
        self.on_death: Callable[[PeerLostError], None] = lambda error: None
        self._backends = backends[GLOBAL].by_device.values()
        self._channel = channel
        self._events = events
        self._parameters = _parameters(topology, settings)
        self._commands = Commands()
        self._dispatch = Dispatch()
        self._survey = StatusTable()
        self._lookout = self._make_lookout()
        self.punctuality = self._make_punctuality()
        self._link = self._make_link()
        self.tally = Counters(WaitWindows(topology.size), self._link.report_waits)
        self.works = WorkTable(topology.rank, self._negotiate, self._urge)
        self.runner = self._make_runner(backends)
        self._worker = Worker(self._parameters)
        self._bypass = self._make_bypass(backends[GLOBAL])
        self._negotiation = Negotiation(self._worker, self._link, self._bypass, self.runner)
        self.ends = self._make_ends()
        self._inquiries = self._make_inquiries()
        self._locator = self._make_locator()
        self._attendance = WaitDuties(self._link, self._dispatch, self._inquiries, self._locator, self._is_driving)
        self.runner.attend(self._attendance.wait)
        self.exchange = self._make_exchange()
        self._fill_dispatch()
        self.driver = self._make_driver()

    def start(self) -> None:
        """Watch the connections and the processes, and start the communication thread."""
        self._channel.watch(self._on_lost)
        for backend in self._backends:
            backend.watch(lambda rank: self._on_lost(rank, has_ended=True))
        self.driver.start()

    def _make_runner(self, backends: Mapping[int, SetBackends]) -> Runner:
        return Runner(
            self._topology.rank,
            self._process_sets,
            backends,
            self.works,
            self._events,
            self.tally,
            self._announce,
            self._adopt,
            self._settle,
        )

    def _make_bypass(self, backends: SetBackends) -> Bypass:
        return Bypass(backends.board, backends.by_device[HOST], self._worker, self._link, self.works, self.runner)

    def _make_ends(self) -> Ends:
        return Ends(
            self._topology,
            self._settings.timeouts,
            self._channel,
            self._link,
            self._bypass,
            self._negotiation,
            self.works,
            self.runner,
            self._commands,
            self._announce,
            lambda: self._inquiries.asked,
        )

    def _make_exchange(self) -> EngineLoop:
        return EngineLoop(
            self._settings.timeouts,
            self._channel,
            self._link,
            self._worker,
            self._bypass,
            self._negotiation,
            self._dispatch,
            self.works,
            self.runner,
            self._make_vote_duties(),
            self._attendance,
            self.ends,
            self._commands,
            self._parameters,
        )

    def _make_vote_duties(self) -> VoteDuties:
        return VoteDuties(self._topology, self._channel, self._lookout, self.ends, self._commands, self._attendance)

    def _make_inquiries(self) -> CoordinatorWatch:
        silence = Watchdog(_stall_inspector(self._settings), self.works.oldest)
        return CoordinatorWatch(
            self._topology, silence, self._lookout, self.works, self._link.inquire, self._link.states, self.ends.fail
        )

    def _fill_dispatch(self) -> None:
        """The handlers of all messages that a rank may get from the coordinator, or the coordinator's rank from it."""
        on = self._dispatch.on
        on(Run, self._negotiation.run)
        on(Refuse, self._negotiation.refuse)
        on(Unknown, self._negotiation.resend)
        on(Withdraw, self._bypass.withdraw)
        on(Status, self._inquiries.hear)
        on(Ping, self._link.pong)
        on(Locate, self._locator.locate)
        on(Stop, self.exchange.stop)
        on(Left, self.ends.all_left)
        on(Abort, self.ends.hear)

    def _make_link(self) -> Link:
        if self._topology.rank != COORDINATOR:
            return RemoteLink(self._channel, self._events)
        isolate_groups = not self._settings.group_fusion
        coordinator = Coordinator(self._process_sets.copy(), self._parameters, isolate_groups=isolate_groups)
        hosts, variable = self._topology.hosts, self._settings.operation_limit
        return LocalLink(
            self._channel,
            coordinator,
            self._make_lookout(),
            DeadlockDetector(self._survey, self._locate),
            self.punctuality,
            self._survey,
            self._events,
            hosts,
            variable,
        )

    def _make_lookout(self) -> StallReporter:
        inspector = _stall_inspector(self._settings)
        if self._topology.rank != COORDINATOR:
            return StallReporter(inspector, self._events)
        return StallReporter(inspector, self._events, StatusRequest(self._survey, self._locate, self._states))

    def _locate(self, ranks: Sequence[int]) -> None:
        """On rank 0: ask ``ranks`` where they stand."""
        others = [rank for rank in ranks if rank != COORDINATOR]
        if others and isinstance(self._link, LocalLink):
            self._link.locate(others)
        if len(others) < len(ranks):
            self._locator.locate()

    def _states(self, ranks: Sequence[int]) -> Mapping[int, ProcessState]:
        return self._link.states(ranks)

    def _make_locator(self) -> StatusProbe:
        rank = self._topology.rank
        return StatusProbe(rank, self.works, self._callers, self._has_news, self._link.answer, self._wake_locator)

    def _callers(self) -> Mapping[int, bool]:
        return self.driver.inside.ever()

    def _has_news(self) -> bool:
        return self._worker.has_news

    def _wake_locator(self) -> None:
        """On the thread of the locator: it has found out where this rank stands."""
        self._commands.append(self._locator.look)
        self.driver.notify()

    def _make_punctuality(self) -> StragglerReporter:
        inspector = StragglerInspector(self._topology.size, self._members)
        return StragglerReporter(inspector, self._events, self._topology.hosts)

    def _members(self, process_set: int) -> Sequence[int]:
        return self._process_sets.ranks(process_set) if process_set in self._process_sets else ()

    def _make_driver(self) -> ProgressEngine:
        name, crowded = f"hvd-engine-{self._topology.rank}", Cores.of(self._topology).are_crowded
        return ProgressEngine(self.exchange, name, self._parameters.patient, crowded, self._settings.thread_affinity)

    def counts(self) -> Counts:
        """The work of this rank up to now."""
        introduced = self._worker.introduced
        return Counts(self.tally.counts(introduced.__getitem__), self._link.sent, self._link.received)

    def waiting(self) -> float:
        """How long callers of this rank have waited since the last batch was over, in seconds."""
        since = [work.since for work in self.works.urged()]
        return max(0.0, time.monotonic() - max(self.tally.ended, min(since))) if since else 0.0

    def _is_driving(self) -> bool:
        return self.driver.drives(threading.get_ident())

    def _negotiate(self, works: Sequence[Work]) -> None:
        self.exchange.submit(works)

    def _urge(self, work: Work) -> None:
        self.exchange.urge(work)

    def _adopt(self, parameters: Parameters) -> None:
        """On the driving thread: the next batch runs under ``parameters``."""
        self.exchange.parameters = parameters
        self.driver.patient = parameters.patient

    def _settle(self) -> None:
        """On a thread of a device: an operation is over."""
        self.exchange.settle()
        self.driver.notify()

    def _announce(self) -> None:
        self.driver.announce()

    def _on_lost(self, rank: int, has_ended: bool = False) -> None:
        """On a thread that watches: the connection of ``rank`` or, if it ``has_ended``, its process ended."""
        error = self.ends.lose(rank, has_ended)
        self.driver.notify()
        self._channel.wake()
        if has_ended and error is not None:
            self.on_death(error)


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
