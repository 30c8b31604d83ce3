"""Rank 0 tells its address and the secret over a channel of the launcher: PMI, PMIx, or MPI itself."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError
from collectives.retries import attempts
from executors.meetings.base import Found, Led
from executors.meetings.known_ports import find
from executors.meetings.offer import Offer, serve
from executors.meetings.pmi import Pmi
from executors.meetings.pmix import Pmix

__all__ = ["ByBroadcast", "Channel"]

MOST_BYTES = 2048
# The end of a process, with handlers of atexit, after a meeting that failed.
FINALIZE_SECONDS = 60.0
STDERR = 2
ADVICE = (
    "let mpirun set MASTER_ADDR for all ranks, to the address of the host of rank 0, or HOROVOD_RENDEZVOUS_FOLDER, to "
    "a folder that all hosts share"
)


class Channel(Protocol):
    """A connection of this process to its launcher, or to the other ranks."""

    def broadcast(self, value: bytes | None, seconds: float) -> bytes:
        """Every rank calls this once, rank 0 with a value and the others with None; returns the value of rank 0.

        Raises CollectiveTimeoutError if ranks do not come within ``seconds``, PeerLostError if the launcher ends, and
        SettingsError for an answer that cannot be used.
        """

    def close(self) -> None:
        """End the connection."""


@dataclass(frozen=True, slots=True)
class ByBroadcast:
    """The first of ``channels`` that this process has; the job has ``size`` ranks."""

    channels: tuple[str, ...]
    size: int

    def lead(self, job: str, seconds: float) -> Led:
        """See :class:`.Meeting`. The secret is a random one."""
        with ExitStack() as stack:
            channel = stack.enter_context(closing(self._open(seconds)))
            server, offer = serve(job)
            stack.callback(server.stop)
            channel.broadcast(offer.pack(), seconds)
            stack.pop_all()
        return Led(server, offer.secret, channel.close)

    def follow(self, job: str, seconds: float) -> Found:
        """See :class:`.Meeting`."""
        with ExitStack() as stack:
            channel = stack.enter_context(closing(self._open(seconds)))
            offer = Offer.unpack(channel.broadcast(None, seconds))
            found = find(offer.addresses, [offer.port], offer.secret, job, seconds)
            stack.pop_all()
        return Found(found.address, found.port, offer.secret, channel.close)

    def _open(self, seconds: float) -> Channel:
        for name in self.channels:
            channel = CHANNELS[name](self.size, seconds)
            if channel is not None:
                return channel
        raise SettingsError(
            "the ranks of this mpirun have no way to find one another: pip install mpi4py, built for this MPI, or "
            f"{ADVICE}"
        )


class Mpi:
    """MPI by mpi4py, which calls MPI_Init if nobody did, and MPI_Finalize when the process ends.

    MPI_Finalize waits for all ranks. After a broadcast to which ranks did not come, it gets FINALIZE_SECONDS.
    """

    def broadcast(self, value: bytes | None, seconds: float) -> bytes:
        """See :class:`Channel`. It does not block: a rank that does not come must not hold this one for ever."""
        mpi = importlib.import_module("mpi4py.MPI")
        buffer = bytearray((value or b"").ljust(MOST_BYTES))
        try:
            request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], 0)
            for _ in attempts(seconds):
                if request.Test():
                    atexit.unregister(_bound_finalize)
                    return bytes(buffer).strip()
        except mpi.Exception as error:
            raise PeerLostError(f"MPI_Ibcast of the address of rank 0 failed: {error}; {ADVICE}") from error
        atexit.register(_bound_finalize)
        whom = "rank 0" if value is None else "all other ranks"
        raise CollectiveTimeoutError(
            f"MPI_Ibcast of the address of rank 0 did not end within {seconds:g} s: look at the log of {whom}, raise "
            f"HOROVOD_START_TIMEOUT, or {ADVICE}",
            [] if value is not None else [0],
        )

    def close(self) -> None:
        """mpi4py does it."""


def _bound_finalize() -> None:
    # No code of Python runs as late as MPI_Finalize, which mpi4py calls: the kernel ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, FINALIZE_SECONDS)


def _mpi(size: int, seconds: float) -> Channel | None:
    """None also for an mpi4py that was built for another MPI than the one of mpirun: there, each rank is alone."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return Mpi() if _wait_in_mpi_init_for_all_ranks(seconds).COMM_WORLD.Get_size() == size else None


def _wait_in_mpi_init_for_all_ranks(seconds: float) -> ModuleType:
    """mpi4py's MPI. Its import calls MPI_Init, which may wait for all ranks, and keeps the GIL meanwhile."""
    # Bound: ``seconds``, then the process writes where it waits, and ends; abort: none in MPI.
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
    try:
        return importlib.import_module("mpi4py.MPI")
    finally:
        faulthandler.cancel_dump_traceback_later()


def _mpi_in_use(size: int, seconds: float) -> Channel | None:
    return _mpi(size, seconds) if "mpi4py.MPI" in sys.modules else None


CHANNELS: dict[str, Callable[[int, float], Channel | None]] = {
    "mpi4py if in use": _mpi_in_use,
    "mpi4py": _mpi,
    "pmi": lambda size, seconds: Pmi.open(),
    "pmix": lambda size, seconds: Pmix.open(),
}
