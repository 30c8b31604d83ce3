"""Shared by all frameworks: the one engine of the process, and the functions that ask it for ranks and sizes."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from collectives import (
    GLOBAL,
    ConnectAttempt,
    Engine,
    InvalidRequestError,
    NotInitializedError,
    ProcessExit,
    Settings,
    Starts,
    Topology,
    World,
    communicators,
    logs,
    mpi_library,
    start,
    world_from_environment,
)
from executors import WorkerIdentity, brief
from hvd_cluster.core import memory, observers
from hvd_cluster.core.launchers import Secret, StartingLauncher, warn_of_threads
from hvd_cluster.core.observers import Observers
from hvd_cluster.core.process_sets import (
    ProcessSet,
    check_argument,
    check_same,
    given_to_all,
    global_process_set,
    ranks_in_job,
    sets_of_all,
)
from hvd_cluster.core.worlds import Worlds

logger = logging.getLogger(__name__)

# An exception may have the whole of a tensor in its text.
LONGEST_CAUSE = 300
LOCK_SECONDS = 0.5
"""How long the thread of the live page waits for an engine that starts or ends."""


def _record_for_page(path: str, begins: bool) -> str | None:
    """Begin a timeline in the file ``path``, or end that one; on the thread of the page. Returns what the page shows.

    It never waits long for the lock: the owner may wait for the end of that thread.
    """
    if not _process.lock.acquire(timeout=LOCK_SECONDS):
        return None
    try:
        return observers.record(_process.observers.recorder, path, begins)
    finally:
        _process.lock.release()


class _Process:
    """The engine of this process, and its world."""

    def __init__(self) -> None:
        # Held while an engine starts or ends, which is bounded by the engine's timeouts.
        # Reentrant, because a signal handler may call shutdown() at any point.
        self.lock = threading.RLock()
        self.engine: Engine | None = None
        self.world: World | None = None
        self.starts = Starts()
        # In an elastic job.
        self.worlds: Worlds | None = None
        self.sets: set[ProcessSet] = set()
        # The sets that the next world shall have, too, in the order in which they were registered.
        self.wanted: list[ProcessSet] = []
        self.secret = Secret()
        self.launcher = StartingLauncher()
        # Shut down in a signal handler, which cannot wait, or closed while this process connects in its next world.
        self.ending: list[Engine] = []
        self.exit = ProcessExit()
        # Whether the ranks have met over MPI, or operations run on it.
        self.has_mpi = False
        # Whether the user lets functions that XLA compiles have collectives.
        self.allows_xla = True
        self.observers = Observers(_record_for_page)


_process = _Process()


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Find the other ranks of the job and start the engine. A second call while it runs only looks up its sets, and its
    ``comm``, if there is one, has the same ranks.

    ``comm`` is None or empty for all ranks, or else a list of ranks of MPI.COMM_WORLD, in the order of the ranks here,
    or a communicator of mpi4py: only they call this, and are the job. ``process_sets`` are registered in order, with
    ids 1, 2...; all ranks give the same. Where one is made from a communicator, each rank gives the communicator that
    it is in, or MPI.COMM_NULL, and the sets of all ranks are registered. "dynamic" means no sets at the start; sets may
    be added later in any case, unless HOROVOD_DYNAMIC_PROCESS_SETS is 0. The processes that mpirun, srun, jsrun,
    torchrun or a launcher with its variables started find one another by themselves. Without a launcher this is a world
    of one. Raises SettingsError for a bad ``HOROVOD_*`` variable, and where a launcher offers no way to find rank 0;
    InvalidRequestError for bad arguments, CollectiveTimeoutError or PeerLostError when other ranks do not connect.
    """
    members = check_argument(comm)
    sets = _as_sets(process_sets)
    with _process.lock:
        if _process.engine is None:
            _start(sets, members)
            return
        check_same(members, _process.launcher.members or range(_process.engine.topology.size))
        _look_up(sets, _process.engine)


def _as_sets(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> list[ProcessSet]:
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return []
    if isinstance(process_sets, str | ProcessSet) or not isinstance(process_sets, Iterable):
        raise InvalidRequestError(
            f"init(process_sets={process_sets!r}) must be a list of process sets or of lists of ranks, such as [[0, 1]]"
        )
    return [_as_set(entry) for entry in process_sets]


def has_mpi() -> bool:
    """Whether the engine runs, and its ranks have met over MPI or its operations run on it."""
    return _process.engine is not None and _process.has_mpi


def allows_xla() -> bool:
    """Whether functions that XLA compiles may have collectives, as far as HOROVOD_ENABLE_XLA_OPS says."""
    return _process.allows_xla


def _as_set(entry: ProcessSet | Sequence[int]) -> ProcessSet:
    return entry if isinstance(entry, ProcessSet) else ProcessSet(entry)


def _start(sets: list[ProcessSet], comm: object = None) -> None:
    _process.observers.arrival.begin()
    environment = _process.launcher.join(_process.secret.claim(os.environ), comm)
    world = _process.world or world_from_environment(environment)
    reading = _Reading(environment)
    settings = reading.of(world.topology)
    logs.configure(settings.log_level, settings.log_hide_time, _identity(environment, world))
    for remark in settings.remarks:
        logger.warning(remark)
    warn_of_threads(os.environ, world.topology)
    if settings.keep_freed_memory:
        memory.keep_freed_memory(os.environ, world.topology.local_size)
    sets = _with_communicators(sets, comm, world.topology.size, settings)
    worlds = _process.worlds = _process.worlds or Worlds.of(environment, world, settings, _running_engine)
    _want(sets)
    sets = [] if worlds is not None and worlds.is_alone else sets
    connect = partial(_connect, reading, sets)
    engine = connect(world) if worlds is None else worlds.connect(world, connect)
    if worlds is not None:
        entered = replace(world, round=worlds.round, topology=engine.topology)
        logs.configure(settings.log_level, settings.log_hide_time, _identity(environment, entered))
    _process.engine = engine
    _process.allows_xla = settings.xla_ops
    _process.has_mpi = _process.launcher.members is not None or _runs_on_mpi(settings)
    global_process_set.mpi_comm = comm if communicators.is_communicator(comm) else None
    _process.observers.follow(engine, world, worlds, reading.of(engine.topology), environment)
    for id, entry in enumerate((global_process_set, *sets), start=GLOBAL):
        _register(engine, id, entry)
    if worlds is not None:
        worlds.entered()


def _runs_on_mpi(settings: Settings) -> bool:
    """A rank that is alone, or has no GPU, does not load MPI for operations that it does not exchange."""
    return "mpi" in (settings.cpu_operations, settings.gpu_operations) and mpi_library.loaded_mpi() is not None


def _identity(environment: Mapping[str, str], world: World) -> logs.Identity:
    worker = WorkerIdentity.of(environment)
    if worker is None:
        return logs.Identity(world.topology.rank)
    return logs.Identity(world.topology.rank, world.round, worker.worker)


class _Reading:
    """The settings in ``environment``, which are read once for each place of this process on its host."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._known: dict[tuple[int, int], Settings] = {}

    def of(self, topology: Topology) -> Settings:
        """Those at the place in ``topology``."""
        place = topology.local_rank, topology.local_size
        if place not in self._known:
            self._known[place] = Settings.from_environment(self._environment, topology)
        return self._known[place]


def _connect(
    reading: _Reading, sets: Sequence[ProcessSet], world: World, attempt: ConnectAttempt | None = None
) -> Engine:
    ranks = [tuple(entry.ranks or ()) for entry in sets]
    return start.connect(world, reading.of(world.topology), ranks, _process.starts, attempt)


def _running_engine() -> Engine | None:
    return _process.engine


def _with_communicators(sets: Sequence[ProcessSet], comm: object, size: int, settings: Settings) -> list[ProcessSet]:
    """``sets`` with the ranks of communicators, and those that other ranks give at the same places; equal on all ranks.

    A set of MPI.COMM_NULL stands for the one that the others give, if that is only one.
    """
    if all(entry.mpi_comm is None for entry in sets):
        return list(sets)
    for entry in sets:
        _resolve(entry, size)
    own = [entry.ranks or [] for entry in sets if entry.mpi_comm is not None]
    places = iter(sets_of_all(mpi_library.start_mpi(settings.timeouts.connect), comm, own, settings.timeouts.connect))
    whole: list[ProcessSet] = []
    for entry in sets:
        found = [entry.ranks or []] if entry.mpi_comm is None else next(places)
        if not entry.ranks and len(found) == 1:
            entry.ranks = found[0]
        whole += [entry if ranks == entry.ranks else ProcessSet(ranks) for ranks in found]
    return whole


def _resolve(entry: ProcessSet, size: int) -> None:
    """Give a set from a communicator its ranks in this job, which has ``size``; a registered one has them already."""
    mpi = mpi_library.loaded_mpi()
    if mpi is not None and entry.mpi_comm is not None and entry.process_set_id is None:
        entry.ranks = ranks_in_job(mpi, entry.mpi_comm, _process.launcher.members, size)


def _want(sets: Iterable[ProcessSet]) -> None:
    _process.wanted += [entry for entry in sets if entry not in _process.wanted]


def _look_up(sets: list[ProcessSet], engine: Engine) -> None:
    for entry in sets:
        _resolve(entry, engine.topology.size)
    ids = {engine.process_sets.ranks(id): id for id in engine.process_sets.ids()}
    if not all(tuple(entry.ranks or ()) in ids for entry in sets):
        raise InvalidRequestError("init() was called already, without these process sets; call shutdown() first")
    for entry in sets:
        _register(engine, ids[tuple(entry.ranks or ())], entry)


def _register(engine: Engine, id: int, entry: ProcessSet) -> None:
    entry._register(id, engine.process_sets.ranks(id), engine.topology.rank)
    _process.sets.add(entry)


def _unregister_all() -> None:
    while _process.sets:
        _process.sets.pop()._unregister()


def shutdown() -> None:
    """End the engine on all ranks and let ``init()`` start a new one. Does nothing when none runs."""
    _shut_down(Engine.shutdown)


def _shut_down(end: Callable[[Engine], None], goes_on: bool = False) -> None:
    with _process.lock:
        engine, _process.engine = _process.engine, None
        if engine is None:
            return
        _unregister_all()
        end(engine)
        _process.observers.leave(goes_on)
        _process.ending = [each for each in (*_process.ending, engine) if each.is_ending]
    memory.results.close()


def change_world(world: World) -> None:
    """End the engine of this process, and start one among the ranks of ``world``, with the global process set only.

    All ranks of ``world`` call this; a process that the launcher started in ``world`` calls ``init()`` instead. Tensors
    in flight fail with ShutDownError, a HorovodInternalError; handles that are done keep their results. Process sets of
    the earlier world are not registered any more: ``add_process_set`` registers them again, with ranks of ``world``.

    Raises the errors of ``init()``. Then no engine runs, and this process is in ``world``: ``init()`` connects there
    again, ``change_world`` goes on to the next one.
    """
    with _process.lock:
        _shut_down(Engine.step_out, goes_on=True)
        _process.world = world
        _start([])


def _cause_of_exit() -> str:
    """The exception that ends this script, as Python has shown it before; empty where there is none."""
    error = getattr(sys, "last_value", None)
    # A session with a prompt goes on after an exception.
    if error is None or hasattr(sys, "ps1"):
        return ""
    return f"raised {' '.join(brief(error).split())[:LONGEST_CAUSE]}"


def _shut_down_at_exit() -> None:
    _process.exit.begin()
    cause = _cause_of_exit()
    _shut_down(lambda engine: engine.shut_down_at_exit(_process.exit, cause))
    for engine in _process.ending:
        engine.shut_down_at_exit(_process.exit)
    _process.launcher.close()
    memory.leave_to_kernel()


atexit.register(_shut_down_at_exit)


def _forget() -> None:
    """In a forked child: the engine is the parent's. An open copy of its connections would hide the parent's death."""
    engine, _process.engine = _process.engine, None
    ending, _process.ending = _process.ending, []
    _process.lock = threading.RLock()
    _process.exit = ProcessExit()
    _process.secret.forget()
    _process.launcher.forget()
    _process.worlds = None
    _process.observers.disown()
    for each in ending:
        each.disown()
    if engine is not None:
        _unregister_all()
        engine.disown()


os.register_at_fork(after_in_child=_forget)


def worlds() -> Worlds | None:
    """The worlds of this process in an elastic job; None in any other job, and before ``init()``."""
    return _process.worlds


def is_cut_off() -> bool:
    """Whether the engine of this process has ended by itself, so that its next operation raises the reason."""
    running = _process.engine
    return running is not None and running.has_ended


def wanted_sets() -> list[ProcessSet]:
    """The process sets that were registered and not removed, in that order; some may not fit the present world."""
    return list(_process.wanted)


def engine() -> Engine:
    """The running engine; NotInitializedError before ``init()`` and after ``shutdown()``."""
    running = _process.engine
    if running is None:
        _process.exit.hold()
        raise NotInitializedError
    return running


def record(path: str, mark_cycles: bool) -> None:
    """Begin a timeline in the file ``path`` of rank 0; see :func:`start_timeline`."""
    with _process.lock:
        engine()
        _process.observers.recorder.start(path, mark_cycles)


def stop_recording() -> bool:
    """Complete the timeline; False on a rank 0 that has none. NotInitializedError before ``init()``."""
    with _process.lock:
        running, was_recording = engine(), _process.observers.recorder.is_recording
        _process.observers.recorder.stop()
        return was_recording or running.topology.rank != 0


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the work of the ranks from now on, into the file ``file_path`` of rank 0, which is replaced.

    All ranks call it; those that do not are not recorded. With ``mark_cycles`` each decision about the next batches is
    marked. A call with the path that is recorded already does nothing; one with another path ends the recording
    before. A file that cannot be written is logged, and training goes on. Raises InvalidRequestError for a path that
    is none, NotInitializedError before ``init()``.
    """
    path = os.fspath(file_path) if isinstance(file_path, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidRequestError(f"start_timeline(file_path={file_path!r}) must be the path of a file")
    record(path, bool(mark_cycles))


def stop_timeline() -> None:
    """Complete the file of the timeline. Raises NotInitializedError before ``init()``."""
    if not stop_recording():
        logger.warning("stop_timeline() does nothing: no timeline is recorded; start_timeline(path) begins one")


def is_tuning() -> bool:
    """Whether this process searches for better parameters; only rank 0 does. See :mod:`hvd_cluster.autotune`."""
    return _process.observers.autotuner.is_searching


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set while the job runs; all ranks call this with the same one. Returns the registered set.

    In a newcomer of an elastic job, which has no ranks yet, it is registered as soon as the others have it.

    Raises InvalidRequestError for ranks that cannot form a set or already have one, MismatchError on all ranks when
    they request different sets, NotInitializedError before ``init()``.
    """
    running = engine()
    try:
        entry = _as_set(process_set)
        _resolve(entry, running.topology.size)
        if entry.mpi_comm is not None:
            given_to_all(entry.ranks or ())
    except InvalidRequestError as error:
        running.reject_process_set(error)
        raise
    if _process.worlds is not None and _process.worlds.is_alone:
        _want([entry])
        return entry
    _register(running, running.add_process_set(entry.ranks or ()), entry)
    _want([entry])
    return entry


def renew_process_set(entry: ProcessSet) -> None:
    """Register ``entry``, of an earlier world, in the present one. If it has all ranks now, it is the global set."""
    running = engine()
    if len(entry.ranks or ()) == running.topology.size:
        _register(running, GLOBAL, entry)
    else:
        add_process_set(entry)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; all ranks call this. Operations in flight on the set fail.

    Returns False, and does nothing, for the global set and for one that is not registered. Raises MismatchError on all
    ranks when they remove different sets.
    """
    running, id = engine(), process_set.process_set_id
    if id is None or id == GLOBAL:
        return False
    registered = [entry for entry in list(_process.sets) if entry.process_set_id == id]
    running.remove_process_set(id)
    _process.wanted = [entry for entry in _process.wanted if entry not in registered]
    for entry in registered:  # but not a set of another thread, which may have got the id by now
        entry._unregister()
        _process.sets.discard(entry)
    return True


def registered_set(ranks: Sequence[int]) -> ProcessSet:
    """The registered process set of ``ranks``; InvalidRequestError if there is none, NotInitializedError."""
    engine()
    for entry in _process.sets:
        if entry.ranks == sorted(ranks):
            return entry
    raise InvalidRequestError(f"no process set has the ranks {sorted(ranks)}; give it to init(process_sets=[...])")


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not."""
    return _process.engine is not None


def _topology() -> Topology:
    """The numbers of this process; those that a newcomer of an elastic job expects, while it is still alone."""
    topology, worlds = engine().topology, _process.worlds
    return topology if worlds is None else worlds.place or topology


def rank() -> int:
    """This process's number among all, 0 to size() - 1; NotInitializedError before ``init()``."""
    return _topology().rank


def size() -> int:
    """The number of processes of the job; NotInitializedError before ``init()``."""
    return _topology().size


def local_rank() -> int:
    """This process's number on its host: the GPU to pin; NotInitializedError before ``init()``."""
    return _topology().local_rank


def local_size() -> int:
    """The number of processes on this host; NotInitializedError before ``init()``."""
    return _topology().local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank; NotInitializedError before ``init()``."""
    return _topology().cross_rank


def cross_size() -> int:
    """The number of hosts that have this local rank; NotInitializedError before ``init()``."""
    return _topology().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes; NotInitializedError before ``init()``."""
    return _topology().is_homogeneous
