"""The user's view of metrics and timeline: the work of this rank in numbers, and a file for Chrome's trace viewer."""

from __future__ import annotations

import logging
import operator
import os
from typing import TYPE_CHECKING

from collectives.api import InvalidRequestError
from hvd_cluster.core import basics

if TYPE_CHECKING:
    from collectives.observe.metrics.values import Metrics


logger = logging.getLogger(__name__)


def metrics() -> Metrics:
    """The work of this process since its first ``init()``: operations, bytes, time waiting for others, stragglers.

    It goes on over the worlds of an elastic job, and stays readable after ``shutdown()``. Any thread may call it, at a
    cost of some ten microseconds. Raises NotInitializedError before ``init()``.
    """
    from collectives.observe.metrics.meter import process_meter  # with the engine, which a launcher does not need

    return process_meter.read()


def count_samples(count: int) -> None:
    """Tell how many samples, such as images, this rank has just used: the live page shows how many a second.

    Any thread may call it, at a cost of a microsecond, also without ``init()``. Raises InvalidRequestError unless
    ``count`` is an integer of at least 0.
    """
    from collectives.observe.metrics.meter import process_meter

    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidRequestError(f"count_samples(count={count!r}) must be an integer of at least 0")
    process_meter.count(number)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the work of the ranks from now on, into the file ``file_path`` of rank 0, which is replaced.

    All ranks call it; those that do not are not recorded. With ``mark_cycles`` each decision about the next batches is
    marked. A call with the path that is recorded already does nothing; one with another path ends the recording
    before. A file that cannot be written is logged, and training goes on. Raises InvalidRequestError for a path that
    is none, NotInitializedError before ``init()``.
    """
    path = os.fspath(file_path) if isinstance(file_path, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidRequestError(f"start_timeline(file_path={file_path!r}) must be the path of a file")
    basics.record(path, bool(mark_cycles))


def stop_timeline() -> None:
    """Complete the file of the timeline. Raises NotInitializedError before ``init()``."""
    if not basics.stop_recording():
        logger.warning("stop_timeline() does nothing: no timeline is recorded; start_timeline(path) begins one")
