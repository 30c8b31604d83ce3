"""The table that gives the backend for a process set, and how the members of the set connect."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from collectives.api import Parameters, SettingsError, Topology
from collectives.backends.base import Backend, Bootstrap, Group, is_large
from collectives.backends.hierarchical.backend import CROSS, FLAT, LOCAL, HierarchicalBackend, HierarchicalBootstrap
from collectives.backends.hierarchical.grid import GridBackend
from collectives.cores import Cores
from collectives.net.interfaces import LOOPBACK
from collectives.settings import CPU_OPERATIONS, Settings


def preload_gloo() -> str:
    """The name of the binding, which is ready for use then; ImportError with the remedy where there is none."""
    from collectives.backends.gloo.library import import_torch
    from collectives.backends.pygloo.bootstrap import require_pygloo

    try:
        import_torch()
    except ImportError:
        try:
            require_pygloo()
        except ImportError:
            pass
        else:
            return "pygloo"
        raise
    return "torch"


def preload_common() -> None:
    """Import the backends that most jobs use, in a process that other ranks will wait for as soon as it connects."""
    import collectives.backends.shm
    import collectives.backends.tcp  # noqa: F401


def join_gloo(group: Group, timeout: float, address: str) -> Bootstrap:
    """The bootstrap of the binding. Raises the errors of GlooBootstrap and PyglooBootstrap."""
    from collectives.backends.gloo import GlooBootstrap
    from collectives.backends.pygloo.bootstrap import PyglooBootstrap

    return (GlooBootstrap if preload_gloo() == "torch" else PyglooBootstrap)(group, timeout, address)


DEVICES = ("cpu", "cuda")
"""The kinds of memory that have a backend, at least on some machines."""


class Row(NamedTuple):
    """A backend for the memory of ``device``, which a job uses if ``variable`` is ``name``."""

    device: str
    name: str
    variable: str


def rows() -> list[Row]:
    """The backends of a job of several ranks, but for the hierarchical one, which consists of others."""
    on_cpu = [Row("cpu", name, "HOROVOD_CPU_OPERATIONS") for name in CPU_OPERATIONS]
    return [*on_cpu, Row("cuda", "nccl", "HOROVOD_GPU_OPERATIONS")]


def absence(device: str) -> str:
    """Why this host has no backend for the memory of ``device``; empty if it has one."""
    if device == "cpu":
        return ""
    from collectives.backends.nccl.bootstrap import unavailable

    return unavailable()


def choose(members: Sequence[int], topology: Topology, settings: Settings, device: str = "cpu") -> str:
    """The name of the backend for the ranks ``members`` and memory of the kind ``device``: the first row that fits.

    =================  ==========================================================================
    single             one member
    hierarchical       several hosts, one of them with several members, unless HOROVOD_HIERARCHICAL_ALLREDUCE
                       and HOROVOD_HIERARCHICAL_ALLGATHER are both 0
    as asked           HOROVOD_CPU_OPERATIONS is not "auto"
    shm                all members are on one host, an x86-64
    tcp                anything else, with more than 64 members in blocks
    =================  ==========================================================================

    A hierarchical backend consists of the backend that this table gives for the members of each host, of the one for
    those of each column of hosts, and of the one between hosts for all members: that which HOROVOD_CPU_OPERATIONS
    names, else tcp. gloo is torch's, or pygloo's where torch is not installed. The memory of GPUs, "cuda", has what
    HOROVOD_GPU_OPERATIONS names, by default nccl; nccl is hierarchical where HOROVOD_HIERARCHICAL_ALLREDUCE or
    HOROVOD_TORUS_ALLREDUCE asks for it. Raises SettingsError where HOROVOD_CPU_OPERATIONS cannot serve these ranks, and
    for a device without a backend.
    """
    if device not in DEVICES:
        raise SettingsError(f"no backend works on the memory of {device}; the devices are: {', '.join(DEVICES)}")
    hosts = {topology.hosts[rank] for rank in members}
    has_stages = 1 < len(hosts) < len(members)
    if device == "cuda":
        is_asked = settings.torus_allreduce or settings.hierarchical_allreduce is True
        is_staged = settings.gpu_operations == "nccl" and has_stages and is_asked
        return "hierarchical" if is_staged else settings.gpu_operations
    if settings.cpu_operations == "shm" and len(hosts) > 1:
        raise SettingsError(
            f"HOROVOD_CPU_OPERATIONS=shm, but the ranks {list(members)} are on {len(hosts)} hosts, which share no "
            "memory; use auto, tcp or gloo"
        )
    if len(members) == 1:
        return "single"
    if has_stages and any(staged(settings).values()):
        return "hierarchical"
    if settings.cpu_operations != "auto":
        return settings.cpu_operations
    # On other processors stores may overtake each other, which the barrier of shm does not guard against.
    return "shm" if len(hosts) == 1 and platform.machine() == "x86_64" else _between(settings)


def _between(settings: Settings) -> str:
    """The backend that joins hosts."""
    return "tcp" if settings.cpu_operations in ("auto", "shm") else settings.cpu_operations


def preload(settings: Settings) -> None:
    """Import the library of the backend between hosts now, if it is there: that takes seconds, and ranks would wait."""
    if settings.cpu_operations != "gloo":
        return

    with suppress(ImportError):  # the user hears of it if a process set needs the backend
        preload_gloo()


def prepare(members: Sequence[int], topology: Topology, settings: Settings, address: str) -> list[Bootstrap]:
    """This rank's bootstraps with the ranks ``members``: one for each of DEVICES.

    The others reach this rank at ``address``. Raises SettingsError.
    """
    group = Group.of(members, topology)
    on_host = _prepare_host(group, topology, settings, address)
    try:
        return [on_host, _prepare_gpu(group, topology, settings, address)]
    except BaseException as error:
        discard([on_host], (), error)
        raise


def _prepare_gpu(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    chosen = choose(group.ranks, topology, settings, "cuda")
    if chosen == "hierarchical":
        return _prepare_gpu_hierarchy(group, topology, settings, address)
    if chosen == "nccl":
        return _nccl(group, topology, settings)
    of_inner = settings if chosen == "host" else replace(settings, cpu_operations=chosen)
    return _through_host(group, topology, of_inner, address)


def _through_host(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    from collectives.backends.nccl.through_host import ThroughHostBootstrap

    def prepare() -> Bootstrap:
        return _prepare_host(group, topology, settings, address)

    return ThroughHostBootstrap(group, prepare, topology.local_rank, settings.async_completion)


def _nccl(group: Group, topology: Topology, settings: Settings) -> Bootstrap:
    from collectives.backends.nccl.bootstrap import NcclBootstrap

    timeout = settings.timeouts.collective
    return NcclBootstrap(group, timeout, topology.local_rank, settings.async_completion)


def _prepare_host(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    name = choose(group.ranks, topology, settings)
    if name == "hierarchical":
        return _prepare_hierarchy(group, topology, settings, address)
    return _PREPARE[name](group, topology, settings, address)


def discard(bootstraps: Iterable[Bootstrap], backends: Iterable[Backend], error: BaseException) -> None:
    """Close the bootstraps and the backends that ``error`` has made useless."""
    for bootstrap in bootstraps:
        bootstrap.close()
    for backend in backends:
        backend.abort(error if isinstance(error, Exception) else RuntimeError(str(error)))
        backend.close()


def staged(settings: Settings) -> dict[str, bool]:
    """The fields of :class:`Parameters` that select the operations that start out in stages."""
    return {
        "hierarchical_allreduce": settings.hierarchical_allreduce is not False,
        "hierarchical_allgather": settings.hierarchical_allgather is not False,
    }


def _prepare_hierarchy(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    def prepare(part: Group) -> Bootstrap:
        return _prepare_host(part, topology, settings, address)

    def prepare_flat(part: Group) -> Bootstrap:
        name = _between(settings)
        return (_linked_tcp if name == "tcp" else _PREPARE[name])(part, topology, settings, address)

    parts = _prepare_parts(group, group.by_host(), prepare, prepare, prepare_flat)
    parameters = Parameters(**staged(settings))
    return HierarchicalBootstrap(group, parts, lambda backends: HierarchicalBackend.of(group, backends, parameters))


def _prepare_gpu_hierarchy(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    from collectives.backends.nccl.presence import device_at
    from collectives.backends.nccl.staged import StagedBackend

    def prepare(part: Group) -> Bootstrap:
        return _nccl(part, topology, settings)

    def prepare_across(part: Group) -> Bootstrap:
        return prepare(part) if settings.torus_allreduce else _through_host(part, topology, settings, address)

    def combine(parts: Mapping[str, Backend]) -> Backend:
        columns = min(map(len, group.by_host()))
        place = partial(device_at, local_rank=topology.local_rank)
        return StagedBackend(parts[LOCAL], parts.get(CROSS), parts[FLAT], columns, place)

    parts = _prepare_parts(group, group.by_host(), prepare, prepare_across, prepare)
    return HierarchicalBootstrap(group, parts, combine)


def _prepare_parts(
    group: Group,
    hosts: Sequence[Sequence[int]],
    inside: Callable[[Group], Bootstrap],
    across: Callable[[Group], Bootstrap],
    flat: Callable[[Group], Bootstrap],
) -> dict[str, Bootstrap]:
    """The parts of a hierarchy: the members of this host, those of this column unless it is in none, and all."""
    host = next(index for index, positions in enumerate(hosts) if group.position in positions)
    column = hosts[host].index(group.position)
    parts: dict[str, Bootstrap] = {}
    try:
        parts[LOCAL] = inside(group.part(hosts[host]))
        if column < min(map(len, hosts)):
            parts[CROSS] = across(group.part([positions[column] for positions in hosts]))
        parts[FLAT] = flat(group)
    except BaseException as error:
        discard(parts.values(), (), error)
        raise
    return parts


def _single(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    from collectives.backends.single import SingleBootstrap

    return SingleBootstrap(group)


def _shm(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    from collectives.backends.shm import ShmBootstrap

    return ShmBootstrap(group, settings.timeouts.collective, Cores.of(topology).are_crowded)


def _tcp(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    """In blocks where the group is large."""
    if not is_large(group.size):
        return _linked_tcp(group, topology, settings, address)

    def prepare(part: Group) -> Bootstrap:
        return _tcp(part, topology, settings, address)

    def prepare_flat(part: Group) -> Bootstrap:
        return _linked_tcp(part, topology, settings, address)

    parts = _prepare_parts(group, GridBackend.divide(group), prepare, prepare, prepare_flat)
    return HierarchicalBootstrap(group, parts, lambda backends: GridBackend.of(group, backends, Parameters()))


def _linked_tcp(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    """In one part."""
    from collectives.backends.tcp import TcpBootstrap

    crowded = Cores.of(topology).are_crowded
    where = _reachable(group, settings, address)
    return TcpBootstrap(group, settings.timeouts.collective, where, settings.secret, crowded, settings.tcp_tls)


def _gloo(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:

    return join_gloo(group, settings.timeouts.collective, _reachable(group, settings, address))


def _pygloo(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    from collectives.backends.pygloo.bootstrap import PyglooBootstrap

    return PyglooBootstrap(group, settings.timeouts.collective, _reachable(group, settings, address))


def _reachable(group: Group, settings: Settings, address: str) -> str:
    """Where a member listens: within one host at LOOPBACK, which no other host can reach."""
    return LOOPBACK if len(set(group.hosts)) == 1 and not settings.interface else address


def _mpi(group: Group, topology: Topology, settings: Settings, address: str) -> Bootstrap:
    from collectives.backends.mpi import MpiBootstrap

    return MpiBootstrap(group, settings.timeouts.collective, settings.mpi.has_threads)


_PREPARE: dict[str, Callable[[Group, Topology, Settings, str], Bootstrap]] = {
    "single": _single,
    "shm": _shm,
    "tcp": _tcp,
    "gloo": _gloo,
    "pygloo": _pygloo,
    "mpi": _mpi,
}
