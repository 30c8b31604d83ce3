"""The mark that a rank leaves in its environment: the processes that it starts inherit it, and are no ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from collectives.api import SettingsError
from executors.environments.place import Place, text

__all__ = ["JOINED", "erase_mark", "leave_mark", "refuse_child"]

JOINED = "_HOROVOD_JOINED"
"""The id of the process that became a rank, a digest of its place, and its connection to the launcher, if any."""
PMI = "PMI_FD"
SOCKET = "socket:"


def leave_mark(environment: MutableMapping[str, str], place: Place) -> None:
    """Note in ``environment`` that this process has the rank of ``place``."""
    environment[JOINED] = f"{os.getpid()} {_digest(place)} {_connection(environment)}".strip()


def erase_mark(environment: MutableMapping[str, str]) -> None:
    """The reverse of :func:`leave_mark`."""
    environment.pop(JOINED, None)


def refuse_child(environment: Mapping[str, str], place: Place) -> None:
    """Raise SettingsError if another process has the rank of ``place`` already, and has started this one."""
    process, digest, connection = (*text(environment, JOINED).split(" "), "", "")[:3]
    # A job of mpirun that a rank starts may have the same variables, but has connections of its own.
    is_started = _connection(environment) not in ("", connection)
    if process == str(os.getpid()) or digest != _digest(place) or is_started:
        return
    raise SettingsError(
        f"this process, {os.getpid()}, is a child of rank {place.rank}, which is process {process}: it has inherited "
        f"the variables of {place.launcher}, but cannot be a second rank {place.rank}. Call hvd.init() only in the "
        f"processes that {place.launcher} started. To train here apart from the job, start this process with "
        f"HOROVOD_SIZE=1 or without {place.variable}; to start several ranks, use hvdrun"
    )


def _digest(place: Place) -> str:
    return hashlib.sha256(f"{place.launcher} {place.job} {place.rank} {place.size}".encode()).hexdigest()[:16]


def _connection(environment: Mapping[str, str]) -> str:
    """The socket that mpirun has given to this process, by its number in the kernel; empty where there is none."""
    with suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{text(environment, PMI) or 'none'}")
        return target if target.startswith(SOCKET) else ""
    return ""
