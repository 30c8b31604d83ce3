"""Which backend serves a process set: one table."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

from collectives.api import SettingsError, Store, Topology
from collectives.backends.base import Backend
from collectives.settings import Settings

__all__ = ["choose", "connect"]


def choose(members: Sequence[int], topology: Topology, cpu_operations: str) -> str:
    """The name of the backend for the ranks ``members``: the first row that fits.

    =================  ====================================
    single             one member
    what was asked     HOROVOD_CPU_OPERATIONS is not "auto"
    shm                all members are on one host, an x86-64
    gloo               anything else
    =================  ====================================
    """
    hosts = {topology.hosts[rank] for rank in members}
    if cpu_operations == "shm" and len(hosts) > 1:
        raise SettingsError(
            f"HOROVOD_CPU_OPERATIONS=shm, but the ranks {list(members)} are on {len(hosts)} hosts, which share no "
            "memory; use auto or gloo"
        )
    if len(members) == 1:
        return "single"
    if cpu_operations != "auto":
        return cpu_operations
    # On other processors stores may overtake each other, which the gate of shm does not guard against.
    return "shm" if len(hosts) == 1 and platform.machine() == "x86_64" else "gloo"


def connect(name: str, rank: int, size: int, store: Store, settings: Settings, address: str) -> Backend:
    """Join the group of ``size`` members that share ``store``, as member ``rank``, which is reached at ``address``."""
    return _CONNECT[name](rank, size, store, settings, address)


def _single(rank: int, size: int, store: Store, settings: Settings, address: str) -> Backend:
    from collectives.backends.single import SingleBackend

    return SingleBackend()


def _shm(rank: int, size: int, store: Store, settings: Settings, address: str) -> Backend:
    from collectives.backends.shm import ShmBackend

    return ShmBackend.connect(rank, size, store, settings.timeouts.collective)


def _gloo(rank: int, size: int, store: Store, settings: Settings, address: str) -> Backend:
    from collectives.backends.gloo import GlooBackend

    hostname = "" if settings.interface else address
    return GlooBackend(rank, size, store, settings.timeouts.collective, settings.interface, hostname)


_CONNECT: dict[str, Callable[[int, int, Store, Settings, str], Backend]] = {
    "single": _single,
    "shm": _shm,
    "gloo": _gloo,
}
