"""The rules of backward: which collective combines the gradients of an operation, and by which factor.

A loss that each rank computes from the result of an operation counts fully after an allreduce and an alltoall, and is
averaged over the ranks after an allgather and a broadcast. The factor of a reducescatter compensates for the average of
the allgather that usually follows.

===============  =====================================================================
operation        gradient of a rank's tensor
===============  =====================================================================
allreduce        allreduce of the gradients with the same op and factors
allgather        average of the gradients, of which a rank keeps its :func:`own_rows`
broadcast        average of the gradients on the root, zeros elsewhere
alltoall         alltoall with the received splits, zeros for rows that were not sent
reducescatter    allgather of the gradients times :func:`scatter_factor`
===============  =====================================================================

The gradients of a named operation travel under :func:`name_of_backward`, because ranks may run backward in different
orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from collectives import InvalidRequestError, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.arguments import Reduction

T = TypeVar("T")


def name_of_backward(name: str | None) -> str | None:
    """The name of the operation that combines the gradients of the operation ``name``."""
    return None if name is None else f"{name}.backward"


def require_linear(op: ReduceOp) -> None:
    """Raise InvalidRequestError if an allreduce with ``op`` has no gradient."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidRequestError(
            f"an allreduce with op {op.name.capitalize()} has no gradient; use Average or Sum, or detach() the "
            "tensor first"
        )


def own_rows(counts: Sequence[int], process_set: ProcessSet) -> slice:
    """The rows of this rank in a gathered tensor to which each member gave ``counts`` of them."""
    rank = process_set.rank() or 0
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def scatter_factor(how: Reduction, process_set: ProcessSet) -> float:
    """The factor of the gradients of a reducescatter: those of a Sum count once for each member."""
    scale = how.prescale_factor * how.postscale_factor
    return scale * (process_set.size() or 1) if how.op is ReduceOp.SUM else scale


def of_group(
    gradients: Sequence[T], is_continuous: Callable[[T], bool], backward: Callable[[list[T]], Iterable[T]]
) -> tuple[T | None, ...]:
    """The result of ``backward`` for the gradients of a group; None for those of integers and bools on all ranks."""
    continuous = [is_continuous(gradient) for gradient in gradients]
    given = [gradient for gradient, has_gradient in zip(gradients, continuous, strict=True) if has_gradient]
    results: Iterator[Any] = iter(backward(given))
    return tuple(next(results) if has_gradient else None for has_gradient in continuous)
