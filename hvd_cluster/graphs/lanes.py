"""Runs of one node that have one name, and so must follow one another.

TensorFlow runs some iterations of a ``tf.while_loop`` at the same time, ten by default. So the name of a run has the
iteration in it, modulo LANES: few names, so that those of a long loop stay in the response cache. Iterations that run
at the same time are neighbours, so each of them meets the same one of the other ranks: an iteration begins only when
the one that is ``parallel_iterations`` before it has ended.

The iterations of a loop in a loop begin anew for each iteration around it: the number of the *frame* is in the name.
That number is a hash, which does not tell neighbours, so these names cannot be few in the same way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from collectives import InvalidRequestError
from hvd_cluster.graphs.run import KernelContext, Step

LANES = 32
"""The largest ``parallel_iterations`` for which the iterations of all ranks are sure to meet."""


class Lane(NamedTuple):
    """The place of a run among those of its node; ``frame`` is 0 unless the node is in a loop in a loop."""

    frame: int = 0
    number: int = 0

    @property
    def suffix(self) -> str:
        """The last part of the name of the run."""
        frame = f"~{self.frame:x}" if self.frame else ""
        return f"{frame}~{self.number}" if self.number else frame


class LaneChooser:
    """Chooses the lanes of the runs of one node; ``is_nested``: it is in a loop in a loop."""

    def __init__(self, is_nested: bool) -> None:
        self._is_nested = is_nested
        self._last: dict[int, tuple[Step, int, int]] = {}

    def choose(self, context: KernelContext) -> Lane:
        """The lane of a run; InvalidRequestError if a later iteration of its loop has been there before."""
        step, frame, iteration = context.step, context.frame, context.iteration
        number = iteration % LANES
        before, self._last[number] = self._last.get(number), (step, frame, iteration)
        if before is not None and before[:2] == (step, frame) and before[2] > iteration:
            raise InvalidRequestError(
                f"iteration {iteration} of a loop has a collective after iteration {before[2]}; of iterations that are "
                f"so far apart, ranks may combine different ones: give the loop parallel_iterations of {LANES} at most"
            )
        return Lane(frame if self._is_nested else 0, number)


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
