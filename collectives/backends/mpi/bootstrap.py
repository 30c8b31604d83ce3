"""How the members of a group connect over MPI: each offers its rank in MPI.COMM_WORLD."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from collectives.api import SettingsError, override
from collectives.backends.base import Bootstrap, Group
from collectives.backends.messaging import MessagingBackend
from collectives.backends.mpi.communicators import KEY_BYTES, create
from collectives.backends.mpi.library import describe, start_mpi
from collectives.backends.mpi.transport import MpiTransport
from collectives.net.attempts import ConnectAttempt

NONCE_BYTES = 8
REMEDY = (
    "start all ranks by one mpirun, that of the MPI which mpi4py has loaded, or by hvdrun --mpi; or leave "
    "HOROVOD_CPU_OPERATIONS=mpi or HOROVOD_GPU_OPERATIONS=mpi out"
)


class MpiBootstrap(Bootstrap):
    """A :class:`Bootstrap`.

    ``timeout`` bounds the silence of a peer within an operation, and the start of MPI, in seconds. Raises SettingsError
    where MPI is missing, or is not that of the mpirun that started this process.
    """

    def __init__(self, group: Group, timeout: float, has_threads: bool = True) -> None:
        self._mpi = start_mpi(timeout, has_threads)
        self._timeout = timeout
        world = self._mpi.COMM_WORLD
        if world.Get_size() < group.size:
            raise SettingsError(_alone(self._mpi, group))
        super().__init__(group, msgpack.packb((world.Get_rank(), world.Get_size(), os.urandom(NONCE_BYTES))))

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> MessagingBackend:
        members, sizes, _ = zip(*map(msgpack.unpackb, offers), strict=True)
        if len(set(members)) < len(members) or len(set(sizes)) > 1:
            raise SettingsError(
                f"the ranks {list(self.group.ranks)} are not of one MPI job, where they would be {list(members)} of "
                f"{list(sizes)}: {REMEDY}"
            )
        key = hashlib.sha256(b"".join(offers)).digest()[:KEY_BYTES]
        communicator = create(self._mpi, members, key, self._watch(attempt))
        return MessagingBackend(MpiTransport(self.group, communicator, self._timeout))

    def _watch(self, attempt: ConnectAttempt) -> Callable[[float], None]:
        def look(waited: float) -> None:
            attempt.check()
            if attempt.is_over:
                raise self.group.late(f"did not connect to MPI within {waited:.1f} s")

        return look


def _alone(mpi: Any, group: Group) -> str:
    return (
        f"operations over MPI need an MPI job with the {group.size} ranks {list(group.ranks)}, but MPI "
        f"({describe(mpi)}) sees {mpi.COMM_WORLD.Get_size()} here: {REMEDY}"
    )
