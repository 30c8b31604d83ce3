"""What this rank has done, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives.metrics.values import Metrics

__all__ = ["metrics"]


def metrics() -> Metrics:
    """The work of this process since its first ``init()``: operations, bytes, time waiting for others, stragglers.

    It goes on over the worlds of an elastic job, and stays readable after ``shutdown()``. Any thread may call it, at a
    cost of some ten microseconds. Raises NotInitializedError before ``init()``.
    """
    from collectives.metrics.meter import process_meter  # with the engine, which a launcher does not need

    return process_meter.read()
