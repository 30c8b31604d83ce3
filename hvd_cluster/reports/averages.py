"""Averages over all ranks, weighted by samples: each rank sends its numbers, and all combine them alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives import InvalidRequestError
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.objects import allgather_object, described

ONE = "values"
"""The name of a number that has none."""


@dataclass(frozen=True)
class Contribution:
    """The message of a rank. ``names`` are those of a dict, None for one number; ``problem`` is why it has nothing."""

    samples: float = 0.0
    names: tuple[str, ...] | None = None
    values: dict[str, float] = field(default_factory=dict)
    problem: str = ""


def average(values: Any, samples: Any, name: str | None, process_set: ProcessSet | None) -> Any:
    """See :meth:`hvd_cluster.reports.metrics_reader.MetricsReader.average`."""
    shares = allgather_object(share_of(values, samples), name or "metrics.average", process_set or global_process_set)
    return combined(shares)


def share_of(values: Any, samples: Any) -> Contribution:
    """The share of a rank. It raises nothing, because the other ranks wait for it."""
    try:
        count = _count(samples)
        if isinstance(values, Mapping):
            names = tuple(sorted(map(str, values)))
            return Contribution(
                count, names, {str(key): _number(key, each) for key, each in values.items()} if count else {}
            )
        return Contribution(count, None, {ONE: _number(ONE, values)} if count else {})
    except Exception as error:  # noqa: BLE001  code of a tensor
        return Contribution(problem=str(error) if isinstance(error, InvalidRequestError) else described(error))


def _count(samples: Any) -> float:
    try:
        count = float(samples)
    except (TypeError, ValueError):
        count = math.nan
    if not 0 <= count < math.inf:
        raise InvalidRequestError(f"samples={samples!r} must be the number of samples of this rank, at least 0")
    return count


def _number(key: object, value: Any) -> float:
    try:
        # torch warns of a tensor with a gradient, such as a loss.
        return float(value.detach() if hasattr(value, "detach") else value)
    except Exception as error:
        raise InvalidRequestError(
            f"{key!r} is a {type(value).__name__}, which is no number ({described(error)}); give a number or a tensor "
            "with one element, outside of compiled functions, or samples=0"
        ) from error


def combined(shares: Sequence[Contribution]) -> Any:
    """The averages. InvalidRequestError if a share has a problem, or the names differ."""
    problems = [f"rank {rank}: {share.problem}" for rank, share in enumerate(shares) if share.problem]
    if problems:
        raise InvalidRequestError(f"metrics.average: {'; '.join(problems)}")
    counted = {rank: share for rank, share in enumerate(shares) if share.samples}
    if not counted:
        return _of_nothing(shares)
    _require_same_names(counted)
    total = math.fsum(share.samples for share in counted.values())
    first = next(iter(counted.values()))
    found = {
        key: _mean([(each.values[key], each.samples / total) for each in counted.values()]) for key in first.values
    }
    return found if first.names is not None else found[ONE]


def _of_nothing(shares: Sequence[Contribution]) -> Any:
    """NaN for each name that a rank has told."""
    told = [share.names for share in shares if share.names is not None]
    return {key: math.nan for key in sorted({key for names in told for key in names})} if told else math.nan


def _require_same_names(counted: Mapping[int, Contribution]) -> None:
    ranks: dict[tuple[str, ...] | None, list[int]] = {}
    for rank, share in counted.items():
        ranks.setdefault(share.names, []).append(rank)
    if len(ranks) > 1:
        told = "; ".join(
            f"ranks {each}: {'one number' if names is None else list(names)}" for names, each in ranks.items()
        )
        raise InvalidRequestError(
            f"metrics.average: the ranks give different names ({told}); give the same on all ranks, and samples=0 on a "
            "rank that has none"
        )


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Exact sums, so that the order of the ranks does not count; the fast way would refuse inf - inf, which is NaN."""
    terms = [value * weight for value, weight in pairs]
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)
