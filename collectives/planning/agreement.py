"""Pure: do the requests of all members make one collective? What a rank can see alone, and what only all can see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from collectives.api import DType, InvalidRequestError, Operation, ReduceOp, Request, UnsupportedRequestError

__all__ = ["SET_CHANGES", "Disagreement", "check_alone", "disagreement", "name_ranks", "sizes"]

REDUCTIONS = frozenset({Operation.ALLREDUCE, Operation.REDUCESCATTER})
SUMS = (ReduceOp.AVERAGE, ReduceOp.SUM)
FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
SET_CHANGES = frozenset({Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET})
FREE_FIRST_DIMENSION = frozenset({Operation.ALLGATHER, Operation.ALLTOALL})
NEEDS_ROWS = "it needs at least one dimension; reshape the scalar to (1,)"
LONGEST_NAME = 1 << 15
"""In characters, each of which takes up to 4 bytes in a message."""


def check_alone(request: Request, rank: int, members: Sequence[int]) -> None:
    """Raise InvalidRequestError for what is wrong with ``request`` whatever the other ranks say."""
    _check_name(request.name)
    if rank not in members:
        raise InvalidRequestError(
            f"{_where(request)}: Rank {rank} is not a member of the provided process set. "
            f"Set {request.process_set} has the ranks {list(members)}; call it on those only"
        )
    if request.operation is Operation.BROADCAST and request.root_rank not in members:
        raise InvalidRequestError(
            f"{_where(request)}: root rank {request.root_rank} is not in the process set; choose one of {list(members)}"
        )
    if request.operation is Operation.ALLTOALL:
        _check_splits(request, len(members))
    if request.operation in REDUCTIONS:
        _check_reduction(request)
    if request.op is ReduceOp.ADASUM:
        _check_adasum(request, len(members))


def _check_name(name: str) -> None:
    if len(name) > LONGEST_NAME:
        raise InvalidRequestError(
            f"a name of {len(name)} characters, {name[:40]!r}..., is too long; at most {LONGEST_NAME} are allowed"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the name {name!r} cannot be sent to the other ranks: {error.reason} at position {error.start}; "
                "choose another one"
            ) from None


def _check_splits(request: Request, size: int) -> None:
    splits, rows = request.splits, request.shape[0] if request.shape else 0
    if len(splits) != size:
        raise InvalidRequestError(
            f"{_where(request)}: splits has {len(splits)} entries, but must have {size}, one for each rank"
        )
    if min(splits) < 0 or sum(splits) > rows:
        raise InvalidRequestError(
            f"{_where(request)}: splits {list(splits)} must be non-negative and add up to at most the {rows} rows of "
            "the tensor"
        )


def _check_reduction(request: Request) -> None:
    for factor in (request.prescale_factor, request.postscale_factor):
        if not isfinite(factor):
            raise InvalidRequestError(
                f"{_where(request)}: a scale factor of {factor} is not allowed; give a finite number"
            )
    scaled = request.prescale_factor != 1.0 or request.postscale_factor != 1.0
    if request.dtype is DType.BOOL and (scaled or request.op is ReduceOp.AVERAGE):
        raise InvalidRequestError(
            f"{_where(request)}: bool tensors cannot be averaged or scaled; convert to float32 first"
        )
    if request.op not in SUMS:
        _check_other_than_sum(request)
    if request.operation is Operation.REDUCESCATTER and not request.shape:
        raise InvalidRequestError(f"{_where(request)}: {NEEDS_ROWS}")


def _check_other_than_sum(request: Request) -> None:
    if request.operation is Operation.REDUCESCATTER:
        raise InvalidRequestError(f"{_where(request)}: op {_public(request.op)} is not available; use Average or Sum")
    if request.dtype.real is not request.dtype:
        raise InvalidRequestError(
            f"{_where(request)}: op {_public(request.op)} is not defined for {request.dtype.label}; use Average or "
            "Sum, or give the real and the imaginary part as tensors of their own"
        )


def _check_adasum(request: Request, size: int) -> None:
    if request.dtype not in FLOATS:
        raise InvalidRequestError(
            f"{_where(request)}: op Adasum needs floats, not {request.dtype.label}; convert the tensor first"
        )
    if size & (size - 1):
        raise UnsupportedRequestError(
            f"{_where(request)}: op Adasum needs a power of two of ranks, not {size}; use a process set of such, or "
            "Average"
        )


def _where(request: Request) -> str:
    """How a message begins. Made for messages only, because every request is checked."""
    return f"{request.operation.value} {request.name!r}"


def _public(op: ReduceOp) -> str:
    """What users call it, in every binding."""
    return op.name.capitalize()


def _trailing(request: Request) -> Any:
    if request.operation in FREE_FIRST_DIMENSION:
        return ("any", *request.shape[1:]) if request.shape else ()
    return request.shape


ASPECTS: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    ("operation", lambda request: request.operation.value),
    ("ranks", lambda request: request.splits if request.operation in SET_CHANGES else None),
    ("group", lambda request: request.group),
    ("number of tensors in the group", lambda request: request.group_size),
    ("device", lambda request: request.device),
    ("dtype", lambda request: request.dtype.label),
    ("shape", _trailing),
    ("op", lambda request: _public(request.op)),
    ("root rank", lambda request: request.root_rank),
    ("prescale factor", lambda request: request.prescale_factor),
    ("postscale factor", lambda request: request.postscale_factor),
)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Why a tensor cannot run.

    Where the ranks disagree, ``values`` has the text that each rank gave for ``property``, as (rank, text).
    """

    text: str
    property: str = ""
    values: tuple[tuple[int, str], ...] = ()


def disagreement(requests: Mapping[int, Request], members: Sequence[int]) -> Disagreement | None:
    """Why the requests (rank -> request, all of one name) are not one collective; None when they are.

    ``members`` without a request have joined. The text names the tensor, the aspect, and what each rank said; it is the
    same whatever the order of arrival.
    """
    first = next(iter(requests.values()))
    for aspect, read in ASPECTS:
        said = {rank: read(request) for rank, request in sorted(requests.items())}
        if len(set(said.values())) > 1:
            return _describe(first.name, aspect, said)
    if first.operation in FREE_FIRST_DIMENSION and not first.shape:
        return Disagreement(f"tensor {first.name!r}: {first.operation.value}: {NEEDS_ROWS}")
    return None if len(requests) == len(members) else _hindrance(first, requests)


def _hindrance(first: Request, requests: Mapping[int, Request]) -> Disagreement | None:
    """Why this cannot run without the members that have joined."""
    if first.operation is Operation.BROADCAST and first.root_rank not in requests:
        return Disagreement(
            f"tensor {first.name!r}: the root, rank {first.root_rank}, has joined and sends nothing; "
            "broadcast from a rank that still has data, or before the root joins"
        )
    if first.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT) and first.prescale_factor != 1.0:
        return Disagreement(
            f"tensor {first.name!r}: op {first.op.name.capitalize()} with a prescale factor is not defined for ranks "
            "that have joined; scale the tensor yourself"
        )
    return None


def _describe(name: str, aspect: str, said: Mapping[int, Any]) -> Disagreement:
    groups: dict[Any, list[int]] = {}
    for rank, value in said.items():
        groups.setdefault(value, []).append(rank)
    parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items()]
    text = (
        f"tensor {name!r}: the ranks disagree about the {aspect}: {'; '.join(parts)}. "
        f"Submit the same {aspect} under this name on every rank"
    )
    return Disagreement(text, aspect, tuple((rank, str(value)) for rank, value in said.items()))


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``; many are cut short."""
    listed = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def sizes(requests: Mapping[int, Request], members: Sequence[int]) -> tuple[int, ...]:
    """What members must know of each other: first dimensions (allgather), all splits (alltoall), else nothing.

    ``members`` without a request have joined, and bring no rows.
    """
    operation = next(iter(requests.values())).operation
    if operation is Operation.ALLGATHER:
        return tuple(requests[rank].shape[0] if rank in requests else 0 for rank in members)
    if operation is Operation.ALLTOALL:
        nothing = (0,) * len(members)
        return tuple(count for rank in members for count in (requests[rank].splits if rank in requests else nothing))
    return ()
