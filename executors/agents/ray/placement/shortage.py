"""Pure: why a request cannot be placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from executors.agents.ray.placement.capacity import fits, matches
from executors.agents.ray.placement.request import RayRequest
from executors.api import PlacementError, counted

__all__ = ["ClusterState", "Outlook", "capacity", "counted", "explain", "show"]


Resources = Mapping[str, float]

SHOWN_HOSTS = 16


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The resources of a cluster: free now, in all, and in all on each live host; and the labels of the hosts."""

    available: Resources = field(default_factory=dict)
    total: Resources = field(default_factory=dict)
    hosts: Mapping[str, Resources] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def matching(self, selector: Mapping[str, str]) -> list[Resources]:
        """The hosts whose labels match ``selector``."""
        return [host for name, host in self.hosts.items() if matches(self.labels.get(name, {}), selector)]


def capacity(request: RayRequest, state: ClusterState) -> int:
    """How many of the request's bundles the hosts can hold when nothing else runs.

    No more than that: bundles with different labels may compete for one host.
    """
    groups = Counter(tuple(selector.items()) for selector in request.selectors) or {(): len(request.bundles)}
    return sum(min(count, _room(request, state.matching(dict(selector)))) for selector, count in groups.items())


def explain(request: RayRequest, state: ClusterState) -> str:
    """Requested, available, total and missing resources, and advice."""
    names = request.total
    lines = [
        f"the cluster has no room for {counted(request.size, 'worker')}",
        f"requested: {_shape(request)}, {show(request.total)} in all",
        f"available: {_only(names, state.available)}",
        f"total: {_only(names, state.total)}{_each(request, state)}",
        *_labels(request, state),
        f"missing: {_missing(request, state)}",
    ]
    return "\n  ".join(lines)


def show(resources: Resources) -> str:
    """``{"CPU": 2.0, "GPU": 0.5}`` -> ``2 CPU + 0.5 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _only(names: Iterable[str], resources: Resources) -> str:
    return show({name: resources.get(name, 0.0) for name in names})


def _room(request: RayRequest, hosts: Sequence[Resources]) -> int:
    counts = [fits(request.bundle, host) for host in hosts]
    if request.strategy == "STRICT_PACK":
        return max(counts, default=0)
    return sum(min(1, count) for count in counts) if request.strategy == "STRICT_SPREAD" else sum(counts)


def _shape(request: RayRequest) -> str:
    if request.strategy == "STRICT_SPREAD":
        return f"{counted(len(request.bundles), 'different host')} with {show(request.bundle)} each"
    together = ", together on one host" if request.strategy == "STRICT_PACK" else ""
    return f"{counted(request.size, 'worker')} with {show(request.bundle)} each{together}"


def _labels(request: RayRequest, state: ClusterState) -> list[str]:
    """For each selector of the request, how many hosts match it."""
    selectors = {tuple(selector.items()): selector for selector in request.selectors if selector}
    found = [f"{len(state.matching(selector))} match {selector}" for selector in selectors.values()]
    return [f"labels: of {counted(len(state.hosts), 'host')}, {'; '.join(found)}"] if found else []


def _each(request: RayRequest, state: ClusterState) -> str:
    shown = list(state.hosts.items())[:SHOWN_HOSTS]
    hosts = [f"{name}: {_only(request.total, host)}" for name, host in shown]
    hosts += [f"and {len(state.hosts) - len(shown)} more"] if len(state.hosts) > len(shown) else []
    return f" on {counted(len(state.hosts), 'host')} ({'; '.join(hosts)})"


def _missing(request: RayRequest, state: ClusterState) -> str:
    wanted = len(request.bundles)
    room = capacity(request, state)
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


# The hosts of a cluster start one after the other. After so long without a new one, no other is expected.
JOIN_S = 5.0


class Outlook:
    """Judges ``request`` by the states of the cluster; ``may_grow`` tells whether an autoscaler may add hosts.

    The last host joined ``quiet`` seconds before the first state.
    """

    def __init__(self, request: RayRequest, may_grow: Callable[[], bool], quiet: float = 0.0) -> None:
        self._request = request
        self._may_grow = may_grow
        self._quiet = quiet
        self._hosts: frozenset[str] | None = None
        self._since = 0.0

    def check(self, state: ClusterState, now: float) -> None:
        """Take the state at ``now``, in seconds.

        Raises PlacementError when the hosts have been too few or too small for JOIN_S seconds, even if all were idle,
        while none joined, and no autoscaler adds any.
        """
        before, self._hosts = self._hosts, frozenset(state.hosts)
        if before is None:
            self._since = now - self._quiet
        elif self._hosts - before:
            self._since = now
        if capacity(self._request, state) >= len(self._request.bundles):
            self._since = now
        elif now - self._since >= JOIN_S and not self._may_grow():
            raise PlacementError(
                f"{explain(self._request, state)}\n  no host has joined the cluster for {JOIN_S:g} s, and no "
                "autoscaler adds any; start the hosts before the job, or ask for less"
            )
