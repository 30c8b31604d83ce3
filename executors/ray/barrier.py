"""The barrier of ``ray.train.report``, at which all workers wait for one another, also for one that is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import ray
from ray.exceptions import RayError

# Ray Train lifts it itself where it replaces a worker, but has no public name for that.
from ray.train.v2._internal.execution.context import get_train_context

__all__ = ["BarrierGuard"]

TICK_S = 1.0
ANSWER_S = 30.0


class BarrierGuard:
    """In the block, workers do not wait at the barrier while ``is_cut_off()``: the collectives of this one have ended.

    Another worker may be lost, or wait for this one in the next world. Reports that are skipped so are only told by a
    warning of Ray Train. Owns the daemon thread "hvd-barrier", which ends with the block.
    """

    def __init__(self, is_cut_off: Callable[[], bool]) -> None:
        self._is_cut_off = is_cut_off
        self._barrier = get_train_context().get_synchronization_actor()
        self._stopped = threading.Event()
        # Owner: this object; bound: none, it watches; abort: the end of the block.
        self._thread = threading.Thread(target=self._run, name="hvd-barrier", daemon=True)

    def __enter__(self) -> BarrierGuard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(ANSWER_S)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            if self._is_cut_off():
                with suppress(RayError):
                    ray.get(self._barrier.reset.remote(), timeout=ANSWER_S)
