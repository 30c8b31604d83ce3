"""Which backend serves a process set: one table; and how its members connect."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence

from collectives.api import SettingsError, Store, Topology
from collectives.backends.base import Backend
from collectives.backends.group import Group
from collectives.backends.hierarchical import HierarchicalBackend
from collectives.backends.host import HostBackend
from collectives.parameters import Parameters
from collectives.rendezvous.store import PrefixStore
from collectives.settings import Settings

__all__ = ["DEVICES", "choose", "connect", "discard", "staged"]

DEVICES = ("cpu",)
"""The kinds of memory that have a backend."""


def choose(members: Sequence[int], topology: Topology, settings: Settings, device: str = "cpu") -> str:
    """The name of the backend for the ranks ``members`` and memory of the kind ``device``: the first row that fits.

    =================  ==========================================================================
    single             one member
    hierarchical       several hosts, one of them with several members, unless HOROVOD_HIERARCHICAL_ALLREDUCE
                       and HOROVOD_HIERARCHICAL_ALLGATHER are both 0
    what was asked     HOROVOD_CPU_OPERATIONS is not "auto"
    shm                all members are on one host, an x86-64
    gloo               anything else
    =================  ==========================================================================

    A hierarchical backend consists of the backend that this table gives for the members of each host, and of gloo
    between hosts. Raises SettingsError where HOROVOD_CPU_OPERATIONS cannot serve these ranks, and for a device that has
    no backend.
    """
    if device not in DEVICES:
        raise SettingsError(f"no backend works on the memory of {device}; the devices are: {', '.join(DEVICES)}")
    hosts = {topology.hosts[rank] for rank in members}
    if settings.cpu_operations == "shm" and len(hosts) > 1:
        raise SettingsError(
            f"HOROVOD_CPU_OPERATIONS=shm, but the ranks {list(members)} are on {len(hosts)} hosts, which share no "
            "memory; use auto or gloo"
        )
    if len(members) == 1:
        return "single"
    if 1 < len(hosts) < len(members) and any(staged(settings).values()):
        return "hierarchical"
    if settings.cpu_operations != "auto":
        return settings.cpu_operations
    # On other processors stores may overtake each other, which the gate of shm does not guard against.
    return "shm" if len(hosts) == 1 and platform.machine() == "x86_64" else "gloo"


def connect(
    members: Sequence[int], topology: Topology, settings: Settings, store: Store, address: str
) -> list[Backend]:
    """The backends of this rank for the ranks ``members``, one for each of DEVICES.

    All members call this with a ``store`` of their own. The others reach this rank at ``address``. Raises
    SettingsError, CollectiveTimeoutError, PeerLostError.
    """
    return [_connect_host(members, topology, settings, store, address)]


def _connect_host(
    members: Sequence[int], topology: Topology, settings: Settings, store: Store, address: str
) -> HostBackend:
    name = choose(members, topology, settings)
    if name == "hierarchical":
        return _connect_hierarchy(members, topology, settings, store, address)
    return _join(name, members, topology, settings, store, address)


def discard(backends: Iterable[Backend], error: BaseException) -> None:
    """End backends that are of no use because of ``error``."""
    for backend in backends:
        backend.abort(error if isinstance(error, Exception) else RuntimeError(str(error)))
        backend.close()


def staged(settings: Settings) -> dict[str, bool]:
    """The fields of :class:`Parameters` that say which operations begin in stages."""
    return {
        "hierarchical_allreduce": settings.hierarchical_allreduce is not False,
        "hierarchical_allgather": settings.hierarchical_allgather is not False,
    }


def _connect_hierarchy(
    members: Sequence[int], topology: Topology, settings: Settings, store: Store, address: str
) -> HostBackend:
    group = Group.of(members, topology)
    hosts = group.by_host()
    host = next(index for index, positions in enumerate(hosts) if group.position in positions)
    column = hosts[host].index(group.position)
    groups = {f"host-{host}": hosts[host]}
    if column < min(map(len, hosts)):
        groups[f"column-{column}"] = [positions[column] for positions in hosts]
    parts: list[HostBackend] = []
    try:
        for name, positions in groups.items():
            ranks = group.part(positions).ranks
            parts.append(_connect_host(ranks, topology, settings, PrefixStore(store, name), address))
        parts.append(_join("gloo", members, topology, settings, store, address))
    except BaseException as error:
        discard(parts, error)
        raise
    local, *cross, flat = parts
    return HierarchicalBackend(group, local, cross[0] if cross else None, flat, Parameters(**staged(settings)))


def _join(
    name: str, members: Sequence[int], topology: Topology, settings: Settings, store: Store, address: str
) -> HostBackend:
    return _JOIN[name](Group.of(members, topology), PrefixStore(store, name), settings, address)


def _single(group: Group, store: Store, settings: Settings, address: str) -> HostBackend:
    from collectives.backends.single import SingleBackend

    return SingleBackend(group)


def _shm(group: Group, store: Store, settings: Settings, address: str) -> HostBackend:
    from collectives.backends.shm import ShmBackend

    return ShmBackend.connect(group, store, settings.timeouts.collective)


def _gloo(group: Group, store: Store, settings: Settings, address: str) -> HostBackend:
    from collectives.backends.gloo import GlooBackend

    hostname = "" if settings.interface else address
    return GlooBackend(group, store, settings.timeouts.collective, settings.interface, hostname)


_JOIN: dict[str, Callable[[Group, Store, Settings, str], HostBackend]] = {
    "single": _single,
    "shm": _shm,
    "gloo": _gloo,
}
