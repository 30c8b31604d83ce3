"""Runs of one node that must follow one another, because they have one name.

TensorFlow runs up to ten iterations of a ``tf.while_loop`` at the same time. So the name of a node has the iteration in
it, modulo LANES: few names, so that those of a long loop stay in the response cache. Runs of one name wait their turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

__all__ = ["LANES", "Lanes"]

LANES = 4


class Lanes:
    """In each lane one run is in flight; others wait for it, in the order in which they came. For any thread."""

    def __init__(self) -> None:
        # Owned by this object, held for a few instructions.
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}

    def enter(self, lane: Hashable, begin: Callable[[], None]) -> None:
        """Call ``begin`` now, or when those that came to the ``lane`` before have left it."""
        with self._lock:
            queue = self._waiting.get(lane)
            if queue is not None:
                queue.append(begin)
                return
            self._waiting[lane] = deque()
        begin()

    def leave(self, lane: Hashable) -> None:
        """The run in the ``lane`` is over: the next one begins."""
        with self._lock:
            queue = self._waiting[lane]
            if not queue:
                del self._waiting[lane]
                return
            begin = queue.popleft()
        begin()
