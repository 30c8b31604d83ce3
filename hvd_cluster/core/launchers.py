"""The questions of ``init()`` to the launcher that started this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from collectives import (
    ENVIRONMENT_SECRET,
    InvalidRequestError,
    MpiChoice,
    SettingsError,
    Topology,
    mpi_library,
    usable_cores,
)
from executors import (
    Farewell,
    Joined,
    Place,
    WorkerIdentity,
    bootstrap,
    launcher_table,
    parse_seconds,
    place_among,
    thread_remark,
    threads_of,
)
from hvd_cluster.core.process_sets import MPIRUN, members_of

logger = logging.getLogger(__name__)


RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"


class Secret:
    """Moves the secret from the environment into memory, for this process alone.

    A child process inherits the environment. It needs no secret: only the launchers start ranks, and each of their jobs
    has a secret of its own.
    """

    def __init__(self) -> None:
        self._text = ""

    def claim(self, environment: MutableMapping[str, str]) -> dict[str, str]:
        """A copy of ``environment`` with the secret, which this removes from ``environment`` itself.

        A secret in ``environment`` replaces the one of an earlier call. Raises SettingsError if a launcher has named a
        rendezvous but this process has no secret for it.
        """
        self._text = environment.pop(ENVIRONMENT_SECRET, "") or self._text
        if environment.get(RENDEZVOUS, "").strip() and not self._text:
            raise SettingsError(
                f"{RENDEZVOUS} is set, but this process has no secret of the job, {ENVIRONMENT_SECRET}: a rank has "
                "started it after hvd.init(), and it cannot be a rank itself, or what started it has dropped variables "
                "of the launcher. Call hvd.init() only in the process that the launcher started, with all its variables"
            )
        return {**environment, ENVIRONMENT_SECRET: self._text} if self._text else dict(environment)

    def forget(self) -> None:
        """Drop the secret, in a child process that was forked."""
        self._text = ""


START_TIMEOUT = "HOROVOD_START_TIMEOUT"
# Batch systems start the hosts of a job minutes apart.
START_TIMEOUT_SECONDS = 300.0

_thread_counts: dict[str, Callable[[], int]] = {}


def register_thread_count(framework: str, count: Callable[[], int]) -> None:
    """Let ``count()`` return the threads that ``framework`` computes with: the user may have set them by a call."""
    _thread_counts[framework] = count


class StartingLauncher:
    """The launcher that started this process, where it is none of ours.

    ``join`` finds the other ranks once, for all calls of ``init()``. In rank 0, the rendezvous server of the job runs
    until :meth:`close`, and so does what it serves after a rendezvous that failed. ``members`` are the ranks of
    MPI.COMM_WORLD that are the job; None where the ranks have not met over MPI.
    """

    def __init__(self) -> None:
        self.members: tuple[int, ...] | None = None
        self._joined: Joined | None = None
        self._farewell = Farewell()

    def join(self, environment: Mapping[str, str], comm: object = None) -> dict[str, str]:
        """``environment`` with the variables of a rank; as it is, where no other launcher started several processes.

        ``comm`` are the ranks of the job, as :func:`hvd_cluster.core.process_sets.check_argument` returns them. Raises
        what :func:`executors.launchers.bootstrap.join` raises, SettingsError in a child process of a rank and where MPI
        cannot be used, and InvalidRequestError for a ``comm`` without this process.
        """
        choice = MpiChoice.from_environment(environment)
        _refuse_impossible(environment, comm, choice)
        place = launcher_table.place_of(environment)
        if self._joined is None and place is not None:
            bootstrap.refuse_child(environment, place)
        if comm is not None or (choice.is_asked and not launcher_table.is_ours(environment)):
            return self._join_by_mpi(environment, place, comm, choice)
        if self.members is not None:
            self.close()
        return dict(environment) if place is None else self._join(environment, place, place)

    def _join_by_mpi(
        self, environment: Mapping[str, str], started: Place | None, comm: object, choice: MpiChoice
    ) -> dict[str, str]:
        """As :meth:`join`; ``started`` is the place of this process among all that the launcher has started.

        MPI starts before anything else: PMI serves one client in a process, and that has to be MPI.
        """
        mpi = mpi_library.start_mpi(_start_timeout(environment), choice.has_threads)
        _check_launcher(mpi, started)
        members = members_of(mpi, comm)
        if members != self.members:
            self.close()
        self.members = members
        if len(members) == 1:
            return {**environment, "HOROVOD_SIZE": "1"}
        place = place_among(members, mpi.COMM_WORLD.Get_rank(), started.node if started else "")
        return self._join(environment, place, started)

    def _join(self, environment: Mapping[str, str], place: Place, started: Place | None) -> dict[str, str]:
        if self._joined is None:
            self._joined = bootstrap.join(place, _start_timeout(environment), self._farewell)
            if started is not None:
                bootstrap.leave_mark(os.environ, started)
        return {**environment, **self._joined.environment}

    def close(self) -> None:
        """End what runs for the job in this process."""
        self._farewell.end()
        self.members = None
        joined, self._joined = self._joined, None
        if joined is not None:
            bootstrap.erase_mark(os.environ)
            joined.close()

    def forget(self) -> None:
        """In a forked child: all of it is the parent's. Takes no lock."""
        self._farewell.disown()
        self.members = None
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.disown()


def _refuse_impossible(environment: Mapping[str, str], comm: object, choice: MpiChoice) -> None:
    if comm is None and not choice.is_asked:
        return
    if WorkerIdentity.of(environment) is not None:
        raise SettingsError(
            "an elastic job cannot use MPI, which does not go on without a rank that it has lost: leave "
            "HOROVOD_CPU_OPERATIONS=mpi, HOROVOD_GPU_OPERATIONS=mpi, HOROVOD_CONTROLLER=mpi and init(comm=...) out, or "
            "start a job of fixed size by mpirun"
        )
    if comm is not None and launcher_table.is_ours(environment):
        raise InvalidRequestError(
            "init(comm=...) is for ranks that mpirun has started, but hvdrun, Ray or Spark has started this one: use "
            f"comm=None, with process_sets for groups of ranks; or {MPIRUN}"
        )


def _check_launcher(mpi: Any, started: Place | None) -> None:
    size = mpi.COMM_WORLD.Get_size()
    if started is not None and started.size != size:
        raise SettingsError(
            f"{started.launcher} has started {started.size} processes, but MPI ({mpi_library.describe(mpi)}) sees "
            f"{size}, so it does not know that launcher: {mpi_library.FITTING}"
        )


def _start_timeout(environment: Mapping[str, str]) -> float:
    given = environment.get(START_TIMEOUT, "").strip()
    try:
        return parse_seconds(given, START_TIMEOUT) if given else START_TIMEOUT_SECONDS
    except ValueError as error:
        raise SettingsError(str(error)) from None


def warn_of_threads(environment: Mapping[str, str], topology: Topology) -> None:
    """Warn, once on each host, if the threads of its ranks exceed the cores that they may use.

    Our launchers set the number of threads themselves. A framework with a registered count says its own number.
    """
    if topology.local_rank:
        return
    cores = usable_cores()
    threads = max([count() for count in _thread_counts.values()], default=0) or threads_of(environment, cores)
    remark = thread_remark(threads, cores, topology.local_size)
    if remark:
        logger.warning(remark)
