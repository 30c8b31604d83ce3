"""Pure: why a request cannot be placed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from executors.ray.request import Request

__all__ = ["ClusterState", "capacity", "counted", "explain", "show"]

Resources = Mapping[str, float]

SHOWN_HOSTS = 16


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The resources of a cluster: free now, in all, and in all on each live host."""

    available: Resources = field(default_factory=dict)
    total: Resources = field(default_factory=dict)
    hosts: Mapping[str, Resources] = field(default_factory=dict)


def capacity(request: Request, hosts: Sequence[Resources]) -> int:
    """How many of the request's bundles ``hosts`` can hold when nothing else runs."""
    limit = 1 if request.strategy == "STRICT_SPREAD" else len(request.bundles)
    return sum(min(limit, _fits(request.bundle, host)) for host in hosts)


def explain(request: Request, state: ClusterState) -> str:
    """Requested, available, total and missing resources, and advice."""
    names = request.total
    lines = [
        f"the cluster has no room for {counted(request.size, 'worker')}",
        f"requested: {_shape(request)}, {show(request.total)} in all",
        f"available: {_only(names, state.available)}",
        f"total: {_only(names, state.total)}{_each(request, state)}",
        f"missing: {_missing(request, state)}",
    ]
    return "\n  ".join(lines)


def show(resources: Resources) -> str:
    """``{"CPU": 2.0, "GPU": 0.5}`` -> ``2 CPU + 0.5 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def counted(number: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _only(names: Iterable[str], resources: Resources) -> str:
    return show({name: resources.get(name, 0.0) for name in names})


def _fits(bundle: Resources, host: Resources) -> int:
    return min(int(host.get(name, 0.0) // amount) for name, amount in bundle.items())


def _shape(request: Request) -> str:
    if request.strategy == "STRICT_SPREAD":
        return f"{counted(len(request.bundles), 'different host')} with {show(request.bundle)} each"
    return f"{counted(request.size, 'worker')} with {show(request.bundle)} each"


def _each(request: Request, state: ClusterState) -> str:
    shown = list(state.hosts.items())[:SHOWN_HOSTS]
    hosts = [f"{name}: {_only(request.total, host)}" for name, host in shown]
    hosts += [f"and {len(state.hosts) - len(shown)} more"] if len(state.hosts) > len(shown) else []
    return f" on {counted(len(state.hosts), 'host')} ({'; '.join(hosts)})"


def _missing(request: Request, state: ClusterState) -> str:
    wanted = len(request.bundles)
    room = capacity(request, list(state.hosts.values()))
    if room < wanted:
        unit = "host" if request.strategy == "STRICT_SPREAD" else "worker"
        return (
            f"{wanted - room} of {counted(wanted, unit)} with {show(request.bundle)} each, even when the cluster is "
            "idle; ask for less, or add hosts"
        )
    lacking = {name: amount - state.available.get(name, 0.0) for name, amount in request.total.items()}
    short = {name: amount for name, amount in lacking.items() if amount > 0}
    if not short:
        return "nothing in all, but the free resources are on the wrong hosts; ask for less, or wait for other jobs"
    return f"{show(short)}, which others use; wait for them, raise placement_group_timeout_s, or add hosts"
