"""The user's view of metrics: the work of this rank, in numbers."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from collectives import InvalidRequestError

if TYPE_CHECKING:
    from collectives import Metrics


def metrics() -> Metrics:
    """The work of this process since its first ``init()``: operations, bytes, time waiting for others, stragglers.

    It goes on over the worlds of an elastic job, and stays readable after ``shutdown()``. Any thread may call it, at a
    cost of some ten microseconds. Raises NotInitializedError before ``init()``.
    """
    from collectives import process_meter

    return process_meter.read()


def count_samples(count: int) -> None:
    """Tell how many samples, such as images, this rank has just used: the live page shows how many a second.

    Any thread may call it, at a cost of a microsecond, also without ``init()``. Raises InvalidRequestError unless
    ``count`` is an integer of at least 0.
    """
    from collectives import process_meter

    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidRequestError(f"count_samples(count={count!r}) must be an integer of at least 0")
    process_meter.count(number)
