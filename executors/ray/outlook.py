"""Pure: whether a request that does not fit into a cluster may fit later."""

from __future__ import annotations

from collections.abc import Callable

from executors.api import PlacementError
from executors.ray.request import Request
from executors.ray.shortage import ClusterState, capacity, explain

__all__ = ["Outlook"]

# The hosts of a cluster start one after the other. After so long without a new one, no other is expected.
JOIN_S = 5.0


class Outlook:
    """Judges ``request`` by the states of the cluster; ``may_grow`` tells whether an autoscaler may add hosts.

    The last host joined ``quiet`` seconds before the first state.
    """

    def __init__(self, request: Request, may_grow: Callable[[], bool], quiet: float = 0.0) -> None:
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
