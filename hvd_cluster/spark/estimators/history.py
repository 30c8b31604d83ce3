"""The history of a fit: averages over the rows of all ranks, the best epoch, and when to stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object, described

logger = logging.getLogger(__name__)

LOSS = "loss"
T = TypeVar("T")
U = TypeVar("U")


@dataclass
class RowAverages:
    """Averages of values over rows: the sums of this rank, or of several.

    Values may be numbers, or tensors of one element, which are not read before :meth:`plain`: to read one of a GPU
    would wait for it.
    """

    rows: int = 0
    sums: dict[Hashable, Any] = field(default_factory=dict)

    def add(self, rows: int, values: Mapping[Any, Any]) -> None:
        """Count ``rows`` more rows, for which the averages are ``values``."""
        self.rows += rows
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * rows

    def copied(self) -> RowAverages:
        """The same, which later rows do not change."""
        return RowAverages(self.rows, dict(self.sums))

    def plain(self) -> RowAverages:
        """The same with numbers."""
        return RowAverages(self.rows, {name: float(value) for name, value in self.sums.items()})

    def means(self) -> dict[Hashable, float]:
        """The average of each value over all rows; empty if there are no rows."""
        return {name: value / self.rows for name, value in self.plain().sums.items()} if self.rows else {}


def merged(parts: Iterable[RowAverages]) -> RowAverages:
    """The averages over the rows of all ``parts``."""
    total = RowAverages()
    for part in parts:
        total.rows += part.rows
        for name, value in part.sums.items():
            total.sums[name] = total.sums.get(name, 0.0) + value
    return total


def over_all_ranks(parts: Mapping[str, RowAverages]) -> dict[str, RowAverages]:
    """The averages over the rows of all ranks, which give the same names; one exchange for all of them."""
    gathered = allgather_object({name: part.plain() for name, part in parts.items()}, "estimator.averages")
    return {name: merged(each[name] for each in gathered) for name in parts}


def any_rank(flag: bool, name: str) -> bool:
    """Whether ``flag`` is true on a rank; the same answer on all of them."""
    return any(allgather_object(bool(flag), f"estimator.{name}"))


def with_all_ranks(make: Callable[[], T], told: Callable[[T], U], name: str) -> tuple[T, list[U]]:
    """What ``make`` returns on this rank, and what is ``told`` of it on each.

    Where it raises on some ranks, these raise their error, and the others ValueError with its text: none waits for it.
    """
    try:
        own = make()
        message: tuple[U | None, str] = told(own), ""
    except Exception as error:
        allgather_object((None, described(error)), name)
        raise
    gathered: Any = allgather_object(message, name)
    for rank, (_, reason) in enumerate(gathered):
        if reason:
            raise ValueError(f"rank {rank} has no first batch: {reason}")
    return own, [found for found, _ in gathered]


def check_gpus(has_gpu: bool) -> None:
    """Raise RuntimeError, on all ranks, where only some of them have a GPU."""
    everyone = allgather_object(has_gpu, "estimator.gpus")
    if any(everyone) != all(everyone):
        without = [rank for rank, has in enumerate(everyone) if not has]
        raise RuntimeError(f"the ranks {without} have no GPU, but the others have; set use_gpu=False")


def require_rows(has_rows: bool) -> None:
    """Raise ValueError where no rank has rows to train with."""
    if not has_rows:
        raise ValueError(
            "there are no rows to train with: the DataFrame is empty, or all of its rows are for validation"
        )


def require_finite(loss: Any, step: int, epoch: int) -> None:
    """Raise FloatingPointError where the ``loss`` is no finite number; ``step`` and ``epoch`` count from 0."""
    value = float(loss)
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss is {value} in step {step + 1} of epoch {epoch + 1} on rank {basics.rank()}; look for rows with "
            "NaN or very large numbers, or lower the learning rate"
        )


def check_rows(epoch: int, total: Mapping[str, RowAverages], validates: bool) -> None:
    """Raise ValueError where no rank has rows. Log a line where none has rows for a validation."""
    require_rows(total["train"].rows > 0)
    if validates and total["validation"].rows == 0:
        logger.warning("epoch %d: there are no rows for validation, so the last epoch is kept", epoch + 1)


def losses_of(record: Mapping[str, Any]) -> tuple[float, float | None]:
    """The loss of the training, and that of the validation if there is one."""
    return record["train"][LOSS], record["validation"][LOSS] if "validation" in record else None


@dataclass
class BestEpoch:
    """The best epoch so far: its number, the loss of its validation, and the states of model and optimizer.

    Without validation it is the last one, whose states are the present ones. ``measure`` says what the loss is of, and
    ``rows`` over how many rows of all ranks.
    """

    epoch: int = -1
    loss: float | None = None
    states: dict[str, Any] = field(default_factory=dict)
    measure: str = ""
    rows: int = 0

    def yields_to(self, value: float | None, measure: str, rows: int) -> bool:
        """Whether an epoch with the monitored ``value`` replaces this one: it is better, or of another ``measure``.

        A fit that goes on from a checkpoint may have another loss, whose values cannot be compared with earlier ones.
        Values over other rows are compared, as there are no better ones; rank 0 logs it.
        """
        if measure != self.measure:
            return True
        if value is not None and self.loss is not None and rows != self.rows and basics.rank() == 0:
            logger.warning(
                "the best epoch so far, %d, was validated over %d rows, and the present one over %d, because ranks "
                "came or left; their losses are compared all the same",
                self.epoch + 1,
                self.rows,
                rows,
            )
        return is_better(value, self.loss)


def is_better(value: float | None, best: float | None) -> bool:
    """Whether an epoch with the monitored ``value`` replaces one with ``best``; None: there is none. NaN is worst."""
    if value is None or best is None:
        return True
    return value < best or (math.isnan(best) and not math.isnan(value))


def has_stalled(values: Sequence[float], patience: int, min_delta: float = 0.0) -> bool:
    """Whether none of the last ``patience`` values is below the least one before by more than ``min_delta``."""
    best, waited = math.inf, 0
    patience = max(patience, 1)  # as in Keras: the first epoch that is no better is the last
    for value in values:
        improved = value < best - min_delta
        best, waited = (value, 0) if improved else (best, waited + 1)
    return waited >= patience
