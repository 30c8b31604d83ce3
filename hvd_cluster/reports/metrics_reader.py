"""The user's view of metrics: the work of this rank, in numbers, and averages of the script's own metrics."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from collectives import InvalidRequestError

if TYPE_CHECKING:
    from collectives import Metrics
    from hvd_cluster.core.process_sets import ProcessSet


class MetricsReader:
    """``hvd.metrics()`` are numbers about the engine, ``hvd.metrics.average(...)`` averages of the script's own."""

    def __call__(self) -> Metrics:
        """The work of this process since its first ``init()``: operations, bytes, time waiting for others, stragglers.

        It goes on over the worlds of an elastic job, and stays readable after ``shutdown()``. Any thread may call it,
        at a cost of some ten microseconds. Raises NotInitializedError before ``init()``.
        """
        from collectives import process_meter

        return process_meter.read()

    def average(
        self,
        values: Mapping[str, Any] | Any,
        samples: float = 1,
        *,
        name: str | None = None,
        process_set: ProcessSet | None = None,
    ) -> Any:
        """The averages of all ranks, weighted by ``samples``: a dict of floats, or a float if ``values`` is a number.

        ``values`` are numbers by name, or one number: of Python, NumPy, or a tensor with one element. ``samples`` is
        how many samples this rank's values are averages of. The members of ``process_set``, by default all ranks, call
        it, and get the same bits.

        A rank with 0 samples counts nothing: its values are not read, and may be None, NaN or of other names. The
        names of all other ranks are equal. A NaN of a rank with samples makes that average NaN. So are all averages if
        no rank has samples. InvalidRequestError on all ranks for values or samples that are no numbers, negative or
        infinite samples, and different names.
        """
        from hvd_cluster.reports.averages import average

        return average(values, samples, name, process_set)

    def __reduce__(self) -> str:
        """Pickled by its name: there is one."""
        return "metrics"


metrics = MetricsReader()


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
