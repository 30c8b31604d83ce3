"""The engine of one rank, as its users see it: submit, poll, synchronize, change process sets, end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from collectives.api import HOST, HorovodInternalError, InvalidRequestError, Operation, Request, ShutDownError, Topology
from collectives.backends.table import staged
from collectives.buffers import Buffer
from collectives.control.base import Channel
from collectives.cores import Cores
from collectives.engine.deciders.base import Decider
from collectives.engine.deciders.negotiated import Negotiated
from collectives.engine.deciders.unison import Unison
from collectives.engine.dispatch import Dispatch
from collectives.engine.driver import Driver
from collectives.engine.exchange import Exchange
from collectives.engine.link import COORDINATOR, Link, LocalLink, RemoteLink
from collectives.engine.lookout import Lookout
from collectives.engine.runner import Connect, Runner
from collectives.engine.set_backends import SetBackends
from collectives.engine.silence import Silence
from collectives.engine.work import Destination, Work, fresh
from collectives.engine.work_table import WorkTable
from collectives.events import EventStream, Submitted
from collectives.parameters import PATIENCE_SECONDS, Parameters
from collectives.planning.agreement import SET_CHANGES, check_member, checked
from collectives.planning.board import Board
from collectives.planning.coordinator import Coordinator
from collectives.planning.messages import Refuse, Run, Unknown, Withdraw
from collectives.planning.process_sets import GLOBAL, ProcessSets
from collectives.planning.stalls import StallInspector
from collectives.planning.worker import Worker
from collectives.process_exit import ProcessExit
from collectives.settings import Settings

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

CYCLE_SECONDS = 0.001
ADD = Request("process_set.add", Operation.ADD_PROCESS_SET)


class Engine:
    """Collectives among the ranks of a job, submitted in any order, by name.

    ``backends`` has those of each process set this rank is a member of; ``connect`` makes those of sets that are added.
    The engine owns ``channel`` and all backends and closes them. All public methods are safe from any thread. A
    ``patient`` engine has no core of its own: it moves no data until a caller waits, or for tens of milliseconds, so
    early submissions bring no gain.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        process_sets: ProcessSets,
        channel: Channel,
        backends: Mapping[int, SetBackends],
        connect: Connect,
    ) -> None:
        self.topology = topology
        self.process_sets = process_sets
        self.events = EventStream()
        parameters = _parameters(topology, settings)
        self._timeouts = settings.timeouts
        self._dynamic = settings.dynamic_process_sets
        self._joined: dict[int, Work] = {}
        self._works = WorkTable(topology.rank, self._negotiate, self._urge)
        runner = self._runner = Runner(
            topology.rank,
            process_sets,
            backends,
            connect,
            self._works,
            self.events,
            self._announce,
            self._adopt,
            self._settle,
        )
        link = _link(topology, settings, process_sets, channel, parameters, self.events)
        decider, dispatch = _decider(parameters, backends[GLOBAL].board, link, runner)
        self._exchange = Exchange(
            topology,
            settings.timeouts,
            channel,
            link,
            decider,
            dispatch,
            self._works,
            runner,
            Lookout(_stall_inspector(settings), self.events),
            _silence(topology, settings, self._works),
            self._announce,
            parameters,
        )
        crowded = Cores.of(topology).are_crowded
        self._driver = Driver(
            self._exchange, f"hvd-engine-{topology.rank}", parameters.patient, crowded, settings.thread_affinity
        )
        channel.watch(self._on_lost)
        self._driver.start()

    @property
    def patient(self) -> bool:
        """Whether early submissions bring no gain."""
        return self._driver.patient

    @property
    def parameters(self) -> Parameters:
        """The parameters of the last batch on this rank; before the first batch, those of its own settings."""
        return self._exchange.parameters

    def propose(self, parameters: Parameters) -> None:
        """On rank 0: let ``parameters`` hold on all ranks, from the next batch that is decided on.

        Each rank switches before that batch runs there; its :attr:`parameters` then have a new version. Raises
        InvalidRequestError on other ranks.
        """
        if self.topology.rank != COORDINATOR:
            raise InvalidRequestError(f"rank {self.topology.rank} cannot change parameters; propose them on rank 0")
        self._exchange.propose(parameters)
        self._driver.notify()

    # Tensors.

    def submit(self, request: Request, source: Buffer | None, destination: Destination, unnamed: bool = False) -> Work:
        """Put a tensor in flight and return its handle at once.

        ``source`` must not change and ``destination`` must not be read before the work is done. An ``unnamed`` request
        gets a name: the n-th of an operation on a process set has the same one on every member, and waits its turn
        while that name is in flight. Names repeat after a while, to profit from the response cache. Raises
        InvalidRequestError, DuplicateNameError or, when the engine has ended, the error that ended it.
        """
        work = Work(request, source, destination)
        self.submit_group([work], unnamed)
        return work

    def submit_group(self, works: Sequence[Work], unnamed: bool = False) -> None:
        """Put ``works`` in flight, all of them or none. Several must have one group, and run or fail together.

        An ``unnamed`` group gets a name as unnamed tensors do. Raises the errors of :meth:`submit`.
        """
        with self._driver.inside:
            self._enter(works, unnamed)
            if not self._driver.napping:
                self._driver.notify()

    def run(self, request: Request, source: Buffer | None, destination: Destination, unnamed: bool = False) -> Work:
        """Submit, wait and return the finished work; raises the errors of :meth:`submit` and :meth:`synchronize`."""
        work = Work(request, source, destination)
        work.urged = True
        with self._driver.inside:
            self._enter([work], unnamed)
            self._driver.wait(work)
        work.outcome()
        return work

    def poll(self, work: Work) -> bool:
        """Whether :meth:`synchronize` would return at once. A poll ends any hold on the tensor, as a wait does."""
        if not (work.done or work.urged):
            with self._driver.inside:
                self._exchange.urge(work)
                self._driver.notify()
        return work.done

    def synchronize(self, work: Work) -> Buffer | None:
        """Wait for ``work`` and return its output; raises MismatchError, PeerLostError and the like."""
        with self._driver.inside:
            if not (work.done or self._works.owns(work)):
                name = work.request.name
                raise ShutDownError(f"{name!r} was submitted before Horovod was shut down and started again")
            if not (work.done or work.urged):
                self._exchange.urge(work)
            self._driver.wait(work)
        return work.outcome()

    def reject(self, requests: Sequence[Request], error: InvalidRequestError, unnamed: bool = False) -> None:
        """Report a call of ``requests`` that ended with ``error`` on this rank before it was submitted.

        Members that make the call get a RefusedCallError. ``unnamed`` requests get names, as if they were submitted.
        Does nothing if no member can wait for this rank.
        """
        with self._driver.inside:
            try:
                for request in requests:
                    self._check(request)
            except InvalidRequestError:
                return
            self._reject([Work(request, None, None) for request in requests], unnamed, error)

    def _enter(self, works: Sequence[Work], unnamed: bool) -> None:
        try:
            members = [self._check(work.request) for work in works]
            try:
                for work, ranks in zip(works, members, strict=True):
                    work.request = checked(work.request, ranks)
                    if work.request.device != HOST:
                        self._runner.check(work.request)
            except InvalidRequestError as error:
                self._reject(works, unnamed, error)
                raise
            self._works.enter(works, unnamed)
        except InvalidRequestError as error:
            error.reported = True
            raise
        if self.events.active:
            for work in works:
                self.events.publish(_submitted(work.request, work.since))

    def _reject(self, works: Sequence[Work], unnamed: bool, error: InvalidRequestError) -> None:
        """The call is wrong on this rank; members on which it is right must not wait for this rank."""
        for work in works:
            work.fail(fresh(error))  # a copy without traceback, which would keep the caller's tensors
        self._works.reject(works, unnamed)
        self._driver.notify()

    def _check(self, request: Request) -> Sequence[int]:
        """The members of the set that ``request`` is for; InvalidRequestError where no member waits for this rank."""
        members = self.process_sets.ranks(request.process_set)
        check_member(request, self.topology.rank, members)
        joined = self._joined.get(request.process_set)
        if joined is not None and joined.done:
            self._joined.pop(request.process_set, None)
        elif joined is not None and request.operation not in SET_CHANGES:
            raise self._too_late(request)
        return members

    def _too_late(self, request: Request) -> InvalidRequestError:
        return InvalidRequestError(
            f"{request.operation.value} {request.name!r}: rank {self.topology.rank} has joined process set "
            f"{request.process_set}; submit tensors before join() or after it has returned"
        )

    # Calls for a whole process set.

    def barrier(self, process_set: int = GLOBAL) -> None:
        """Return when every member of the process set has called it, or has joined."""
        self.run(Request("barrier", Operation.BARRIER, process_set=process_set), None, None, unnamed=True)

    def join(self, process_set: int = GLOBAL) -> int:
        """Take part in the others' collectives, without data, until all have joined; returns the last rank to join.

        A rank that has joined brings zeros to sums and averages, no rows to allgather and alltoall, and the neutral
        value to MIN, MAX and PRODUCT; a broadcast must not come from it.
        """
        request = Request("join", Operation.JOIN, process_set=process_set)
        work = Work(request, None, None)
        work.urged = True
        with self._driver.inside:
            self._check(request)
            if self._joined.setdefault(process_set, work) is not work:
                raise self._too_late(request)
            try:
                # The others must not believe that this rank has no data while some of it waits its turn.
                for earlier in self._works.queued(process_set):
                    self._exchange.urge(earlier)
                    self._driver.wait(earlier)
                self._works.enter([work], unnamed=True)
                self._driver.wait(work)
            finally:
                if work.done or not self._works.owns(work):  # or else an interrupt leaves this rank joined
                    self._joined.pop(process_set, None)
        work.outcome()
        return work.answer

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a process set and return its id; all ranks of the job call it with the same ``ranks``.

        InvalidRequestError for ranks that cannot make a set or have one already, and where HOROVOD_DYNAMIC_PROCESS_SETS
        is 0; MismatchError when the ranks disagree.
        """
        request = ADD
        with self._reporting(request):
            self._check_dynamic(ranks)
            request = replace(request, splits=self.process_sets.check(ranks))
        return self.run(request, None, None, unnamed=True).answer

    def reject_process_set(self, error: InvalidRequestError) -> None:
        """Report that :meth:`add_process_set` could not be called, because the ranks can make no list of integers."""
        self.reject([ADD], error, unnamed=True)

    def _check_dynamic(self, ranks: Sequence[int]) -> None:
        if not self._dynamic:
            raise InvalidRequestError(
                f"process set {list(ranks)} cannot be added: HOROVOD_DYNAMIC_PROCESS_SETS is 0; unset it, or give the "
                "set to init(process_sets=[...])"
            )

    def remove_process_set(self, id: int) -> None:
        """Unregister a process set; all ranks of the job call it. Tensors in flight on the set fail.

        InvalidRequestError for the global set and for an unknown id, MismatchError when the ranks disagree.
        """
        request = Request("process_set.remove", Operation.REMOVE_PROCESS_SET)
        with self._reporting(request):
            id, ranks = self.process_sets.check_removable(id)
            request = replace(request, root_rank=id, splits=ranks)
        self.run(request, None, None, unnamed=True)

    @contextmanager
    def _reporting(self, request: Request) -> Iterator[None]:
        """An error in the arguments of ``request``, which has no name yet, ends it on the other ranks, too."""
        try:
            yield
        except InvalidRequestError as error:
            self._reject([Work(request, None, None)], True, error)
            raise

    # Ends.

    def shutdown(self) -> None:
        """End the engine on all ranks: batches agreed on before still run, the rest fails with ShutDownError.

        Waits for the other ranks' communication threads, at most the shutdown timeout. Idempotent. In a signal handler
        that interrupted a call of this thread it does not wait; a second call, later, does. If that call was driving,
        all ranks end at once.
        """
        me = threading.get_ident()
        if self._driver.is_driven_by(me):
            text = f"Horovod has been shut down by rank {self.topology.rank}, in a signal handler"
            self._exchange.fail(ShutDownError(text))
            self._driver.notify()
            return
        if not self._exchange.finished:
            self._exchange.leave()
        self._driver.notify()
        if me in self._driver.inside:
            return
        if not self._driver.join(self._timeouts.shutdown + self._timeouts.collective):
            logger.error("rank %d: the communication thread does not end; it is abandoned", self.topology.rank)

    def shut_down_at_exit(self, exit: ProcessExit) -> None:
        """Like :meth:`shutdown`, while the process ends: daemon threads do not return from their calls."""
        self._driver.inside.hold = exit.hold
        self.shutdown()
        exit.settle(self._driver.inside.ever())

    def abort(self, error: HorovodInternalError) -> None:
        """End the engine on all ranks at once; every pending and future work raises ``error``."""
        self._exchange.abort(error)
        self._driver.notify()

    @property
    def is_ending(self) -> bool:
        """Whether a :meth:`shutdown` did not wait for the communication thread, which is still busy with it."""
        return self._driver.is_running

    def disown(self) -> None:
        """In a forked child: close this copy of the connections, silently; the parent keeps its own. Takes no lock."""
        self._exchange.disown()

    def _negotiate(self, works: Sequence[Work]) -> None:
        self._exchange.submit(works)

    def _urge(self, work: Work) -> None:
        self._exchange.urge(work)

    def _adopt(self, parameters: Parameters) -> None:
        """On the driving thread: the next batch runs under ``parameters``."""
        self._exchange.parameters = parameters
        self._driver.patient = parameters.patient

    def _settle(self) -> None:
        """On a thread of a device: an operation is over."""
        self._exchange.settle()
        self._driver.notify()

    def _announce(self) -> None:
        self._driver.announce()

    def _on_lost(self, rank: int) -> None:
        """On the channel's watch thread: a connection ended."""
        self._exchange.lose(rank)
        self._driver.notify()
        self._exchange.channel.wake()


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


def _submitted(request: Request, now: float) -> Submitted:
    kind, dtype = request.operation.value, request.dtype.label
    return Submitted(request.name, request.process_set, kind, dtype, request.shape, request.nbytes, now)


def _link(
    topology: Topology,
    settings: Settings,
    process_sets: ProcessSets,
    channel: Channel,
    parameters: Parameters,
    events: EventStream,
) -> Link:
    if topology.rank != COORDINATOR:
        return RemoteLink(channel, events)
    coordinator = Coordinator(process_sets.copy(), parameters, isolate_groups=not settings.group_fusion)
    return LocalLink(channel, coordinator, Lookout(_stall_inspector(settings), events), events)


def _decider(parameters: Parameters, board: Board | None, link: Link, runner: Runner) -> tuple[Decider, Dispatch]:
    """The deciders of a rank, the outermost, and the handlers of their messages."""
    worker = Worker(parameters)
    negotiated = Negotiated(worker, link, runner)
    unison = Unison(board, worker, link, negotiated)
    dispatch = Dispatch()
    dispatch.on(Run, negotiated.run)
    dispatch.on(Refuse, negotiated.refuse)
    dispatch.on(Unknown, negotiated.resend)
    dispatch.on(Withdraw, unison.withdraw)
    return unison, dispatch


def _silence(topology: Topology, settings: Settings, works: WorkTable) -> Silence:
    """Rank 0 has the coordinator itself, and so never waits for an answer."""
    return Silence(_stall_inspector(settings) if topology.rank != COORDINATOR else None, works.oldest)


def _stall_inspector(settings: Settings) -> StallInspector | None:
    if settings.stall_warning is None:
        return None
    return StallInspector(settings.stall_warning, settings.stall_shutdown)
