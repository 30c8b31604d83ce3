"""When the nodes that drain will be gone, as Ray tells it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from executors.ray.nodes import deadlines

__all__ = ["Departures"]


class Departures:
    """``deadlines`` has the time at which each node will be gone, where that is known, in seconds of ``clock``.

    Ray may tell it later than that the node drains, and a second notice replaces the first one.
    """

    def __init__(
        self, deadlines: Callable[[], Mapping[str, float]] = deadlines, clock: Callable[[], float] = time.time
    ) -> None:
        self._deadlines = deadlines
        self._clock = clock
        self._told: Mapping[str, float] = {}

    def news(self) -> dict[str, float]:
        """The seconds until each node will be gone whose time has become known, or has changed, since the last call."""
        told, self._told = self._told, dict(self._deadlines())
        now = self._clock()
        return {node: max(0.0, at - now) for node, at in self._told.items() if told.get(node) != at}
