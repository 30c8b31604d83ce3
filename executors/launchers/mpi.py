"""MPI as the channel on which rank 0 tells its address: mpi4py, which calls MPI_Init if nobody did."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from collectives import CollectiveTimeoutError, PeerLostError, SettingsError, communicators, mpi_library

logger = logging.getLogger(__name__)

MOST_BYTES = 2048
ADVICE = (
    "let mpirun set MASTER_ADDR for all ranks, to the address of the host of rank 0, or HOROVOD_RENDEZVOUS_FOLDER, to "
    "a folder that all hosts share"
)


class Mpi:
    """A broadcast in ``communicator``, by ``mpi``, mpi4py's MPI."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._communicator = communicator

    @classmethod
    def open(cls, size: int, seconds: float) -> Mpi | None:
        """Among all processes of mpirun. None where there is no MPI, or another one: there, each rank is alone.

        None also for an MPI that the script has not started yet, or has ended: a call would end the process.
        """
        try:
            mpi = mpi_library.import_mpi(seconds)
        except SettingsError as error:
            logger.info("the ranks do not look for one another by mpi4py: %s", error)
            return None
        is_usable = mpi.Is_initialized() and not mpi.Is_finalized()
        return cls(mpi, mpi.COMM_WORLD) if is_usable and mpi.COMM_WORLD.Get_size() == size else None

    @classmethod
    def open_if_in_use(cls, size: int, seconds: float) -> Mpi | None:
        """As :meth:`open`, but None where the script has not imported mpi4py."""
        return None if mpi_library.loaded_mpi() is None else cls.open(size, seconds)

    @classmethod
    def among(cls, members: Sequence[int], seconds: float) -> Mpi:
        """Among the ranks ``members`` of MPI.COMM_WORLD, each of which calls this.

        Raises CollectiveTimeoutError if some do not come, and SettingsError where MPI cannot be used.
        """
        mpi = mpi_library.start_mpi(seconds)
        key = hashlib.sha256(repr(tuple(members)).encode()).digest()[: communicators.KEY_BYTES]
        try:
            return cls(mpi, communicators.create(mpi, members, key, _late_after(seconds, members)))
        except CollectiveTimeoutError as error:
            mpi_library.spoil(error)  # a message with this key may be left
            raise

    def broadcast(self, value: bytes | None, seconds: float) -> bytes:
        """It does not block: a rank that does not come must not hold this one for ever."""
        buffer = bytearray((value or b"").ljust(MOST_BYTES))
        try:
            request = self._communicator.Ibcast([buffer, self._mpi.BYTE], 0)
            communicators.poll(request.Test, _unanswered_after(seconds, value is None))
        except self._mpi.Exception as error:
            raise PeerLostError(f"MPI_Ibcast of the address of rank 0 failed: {error}; {ADVICE}") from error
        except CollectiveTimeoutError as error:
            mpi_library.suspect(str(error))
            raise
        mpi_library.trust()
        return bytes(buffer).strip()

    def close(self) -> None:
        """MPI goes on to the end of the process."""


def _unanswered_after(seconds: float, is_follower: bool) -> Callable[[float], None]:
    def look(waited: float) -> None:
        if waited > seconds:
            whom = "rank 0" if is_follower else "all other ranks"
            raise CollectiveTimeoutError(
                f"MPI_Ibcast of the address of rank 0 did not end within {seconds:g} s: look at the log of {whom}, "
                f"raise HOROVOD_START_TIMEOUT, or {ADVICE}",
                [0] if is_follower else [],
            )

    return look


def _late_after(seconds: float, members: Sequence[int]) -> Callable[[float], None]:
    deadline = time.monotonic() + seconds

    def look(waited: float) -> None:
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"of the ranks {list(members)} of MPI, some did not call hvd.init() within {seconds:g} s: all of them "
                "must, with the same ranks or communicator; look at their logs, or raise HOROVOD_START_TIMEOUT"
            )

    return look
