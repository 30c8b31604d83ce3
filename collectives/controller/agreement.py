"""Pure: do the requests of all members make one collective? Checks on one rank alone, and checks across ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from operator import index
from typing import Any

from collectives.api import DType, InvalidRequestError, Operation, ReduceOp, Request, UnsupportedRequestError
from collectives.controller.messages import ARGUMENTS, Rejection
from collectives.controller.response_cache import distinct

SUMS = (ReduceOp.AVERAGE, ReduceOp.SUM)
FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
SET_CHANGES = frozenset({Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET})
FREE_FIRST_DIMENSION = frozenset({Operation.ALLGATHER, Operation.ALLTOALL})
NEEDS_ROWS = "it needs at least one dimension; reshape the scalar to (1,)"
SHOWN_REASONS = 4
LONGEST_NAME = 1 << 15
"""In characters, each of which takes up to 4 bytes in a message."""


def check_member(request: Request, rank: int, members: Sequence[int]) -> None:
    """Raise InvalidRequestError for a request that no other rank can be waiting for.

    Its name cannot travel, or ``rank`` is not one of the ``members`` of its process set.
    """
    _check_name(request.name)
    if rank not in members:
        raise InvalidRequestError(
            f"{_where(request)}: Rank {rank} is not a member of the provided process set. "
            f"Set {request.process_set} has the ranks {list(members)}; call it on those only"
        )


def checked(request: Request, members: Sequence[int]) -> Request:
    """``request`` with plain Python numbers, such as messages carry; the same object where it has them already.

    An alltoall without splits gets equal ones. Raises InvalidRequestError for arguments that are wrong
    regardless of the other ranks' requests; these ranks may have submitted the tensor and must learn of the error.
    """
    for length in request.shape:
        if type(length) is not int:
            request = replace(request, shape=_integers(request, "shape", request.shape))
            break
    if type(request.process_set) is not int:
        request = replace(request, process_set=_integers(request, "process set", (request.process_set,))[0])
    check = _CHECKS.get(request.operation)
    return request if check is None else check(request, members)


def _where(request: Request) -> str:
    return f"{request.operation.value} {request.name!r}"


def _integers(request: Request, what: str, values: Sequence[Any]) -> tuple[int, ...]:
    """``values`` as plain integers; the same tuple where it has them already."""
    if type(values) is tuple and all([type(value) is int for value in values]):
        return values
    try:
        return tuple(map(index, values))
    except TypeError:
        raise InvalidRequestError(f"{_where(request)}: {what} {values!r} must consist of integers") from None


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


def _broadcast(request: Request, members: Sequence[int]) -> Request:
    (root,) = _integers(request, "root rank", (request.root_rank,))
    if root not in members:
        raise InvalidRequestError(
            f"{_where(request)}: root rank {root} is not in the process set; choose one of {list(members)}"
        )
    return request if type(request.root_rank) is int else replace(request, root_rank=root)


def _alltoall(request: Request, members: Sequence[int]) -> Request:
    size, rows = len(members), request.shape[0] if request.shape else 0
    splits = _integers(request, "splits", request.splits) or _equal_splits(request, rows, size)
    _check_splits(request, splits, rows, size)
    return request if splits is request.splits else request.changed(splits=splits)


def _check_splits(request: Request, splits: Sequence[int], rows: int, size: int) -> None:
    if len(splits) != size:
        raise InvalidRequestError(
            f"{_where(request)}: splits has {len(splits)} entries, but must have {size}, one for each rank"
        )
    if min(splits) < 0 or sum(splits) > rows:
        raise InvalidRequestError(
            f"{_where(request)}: splits {list(splits)} must be non-negative and add up to at most the {rows} rows of "
            "the tensor"
        )


def _equal_splits(request: Request, rows: int, size: int) -> tuple[int, ...]:
    if rows % size:
        raise InvalidRequestError(
            f"{_where(request)}: without splits, {size} ranks must be able to share the {rows} rows of the tensor "
            "evenly; give splits"
        )
    return (rows // size,) * size


def _reduction(request: Request, members: Sequence[int]) -> Request:
    prescale, postscale = request.prescale_factor, request.postscale_factor
    if not (type(prescale) is float and type(postscale) is float):
        request = _with_floats(request)
    for factor in (prescale, postscale):
        if not isfinite(factor):
            raise InvalidRequestError(
                f"{_where(request)}: a scale factor of {factor} is not allowed; give a finite number"
            )
    scaled = prescale != 1.0 or postscale != 1.0
    if request.dtype is DType.BOOL and (scaled or request.op is ReduceOp.AVERAGE):
        raise InvalidRequestError(
            f"{_where(request)}: bool tensors cannot be averaged or scaled; convert to float32 first"
        )
    if request.op not in SUMS:
        _check_other_than_sum(request, len(members))
    if request.operation is Operation.REDUCESCATTER:
        return _reducescatter(request, len(members))
    return request


def _reducescatter(request: Request, size: int) -> Request:
    if not request.shape:
        raise InvalidRequestError(f"{_where(request)}: {NEEDS_ROWS}")
    splits, rows = _integers(request, "splits", request.splits), request.shape[0]
    if splits:
        _check_splits(request, splits, rows, size)
        if sum(splits) < rows:
            raise InvalidRequestError(
                f"{_where(request)}: splits {list(splits)} must add up to the {rows} rows of the tensor"
            )
    return request if splits is request.splits else request.changed(splits=splits)


def _with_floats(request: Request) -> Request:
    factors = request.prescale_factor, request.postscale_factor
    if not all(isinstance(factor, Real) for factor in factors):
        raise InvalidRequestError(f"{_where(request)}: the scale factors {factors!r} must be real numbers")
    return replace(request, prescale_factor=float(factors[0]), postscale_factor=float(factors[1]))


def _check_other_than_sum(request: Request, size: int) -> None:
    if request.operation is Operation.REDUCESCATTER:
        raise UnsupportedRequestError(
            f"{_where(request)}: op {_public(request.op)} is not available; use Average or Sum"
        )
    if request.dtype.real is not request.dtype:
        raise InvalidRequestError(
            f"{_where(request)}: op {_public(request.op)} is not defined for {request.dtype.label}; use Average or "
            "Sum, or give the real and the imaginary part as tensors of their own"
        )
    if request.op is ReduceOp.ADASUM:
        _check_adasum(request, size)


def _check_adasum(request: Request, size: int) -> None:
    if request.dtype not in FLOATS:
        raise InvalidRequestError(
            f"{_where(request)}: op Adasum needs floats, not {request.dtype.label}; convert the tensor first"
        )
    if size & (size - 1):
        raise UnsupportedRequestError(
            f"{_where(request)}: op Adasum needs a power of two of ranks, not {size}; use Average, or a process set "
            "of such a size"
        )


_CHECKS: dict[Operation, Callable[[Request, Sequence[int]], Request]] = {
    Operation.BROADCAST: _broadcast,
    Operation.ALLTOALL: _alltoall,
    Operation.ALLREDUCE: _reduction,
    Operation.REDUCESCATTER: _reduction,
}


def _public(op: ReduceOp) -> str:
    """The name of ``op`` for users, in every binding."""
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
    ("splits", lambda request: request.splits if request.operation is Operation.REDUCESCATTER else None),
    ("op", lambda request: _public(request.op)),
    ("root rank", lambda request: request.root_rank),
    ("prescale factor", lambda request: request.prescale_factor),
    ("postscale factor", lambda request: request.postscale_factor),
    ("tag", lambda request: request.tag),
)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Why a tensor cannot run.

    Where the ranks disagree, ``values`` has the text that each rank gave for ``property``, as (rank, text), and
    ``tensor`` is the name of that tensor: others of its group fail, too.
    """

    text: str
    property: str = ""
    values: tuple[tuple[int, str], ...] = ()
    tensor: str = ""


def disagreement(requests: Mapping[int, Request], members: Sequence[int]) -> Disagreement | None:
    """Why the requests (rank -> request, all of one name) are not one collective; None when they are.

    ``members`` without a request have joined. The text names the tensor, the aspect, and each rank's value; it does not
    depend on the order of arrival.
    """
    first = next(iter(requests.values()))
    for aspect, read in ASPECTS if _differ(requests) else ():
        values = {rank: read(request) for rank, request in sorted(requests.items())}
        if len(set(values.values())) > 1:
            return _describe(first.name, aspect, values)
    if first.operation in FREE_FIRST_DIMENSION and not first.shape:
        return Disagreement(f"tensor {first.name!r}: {first.operation.value}: {NEEDS_ROWS}")
    return None if len(requests) == len(members) else _hindrance(first, requests)


def _differ(requests: Mapping[int, Request]) -> bool:
    """Whether some requests differ; most are the same object."""
    first, *others = distinct(requests.values())
    return any(request != first for request in others)


def explain_rejections(rejected: Mapping[int, Rejection]) -> Disagreement | None:
    """Why a tensor cannot run: some ranks have rejected it because of their arguments."""
    if not rejected:
        return None
    name = next(iter(rejected.values())).name
    reasons = [f"rank {rank} refused the call: {rejected[rank].reason}" for rank in sorted(rejected)[:SHOWN_REASONS]]
    more = len(rejected) - len(reasons)
    text = f"tensor {name!r}: {'; '.join(reasons)}" + (f"; and {more} more" if more else "")
    values = tuple((rank, each.reason) for rank, each in sorted(rejected.items()))
    return Disagreement(f"{text}. Correct the call there; the name can be used again", ARGUMENTS, values, name)


def _hindrance(first: Request, requests: Mapping[int, Request]) -> Disagreement | None:
    """Why the collective cannot run without the members that have joined."""
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


def describe_kinds(name: str, kinds: Mapping[int, str]) -> Disagreement:
    """The ranks wait for each other in operations of different ``kinds`` under one name, empty for none."""
    if name:
        return replace(_describe(name, "operation", kinds), tensor="")  # the kinds have different names
    text = (
        f"the ranks call different operations, each without a name: {with_ranks(kinds, '; ')}. Call the same ones in "
        "the same order on every rank, or give them names; further calls without names do not meet"
    )
    return Disagreement(text, "operation", tuple(kinds.items()))


def _describe(name: str, aspect: str, values: Mapping[int, Any]) -> Disagreement:
    text = (
        f"tensor {name!r}: the ranks disagree about the {aspect}: {with_ranks(values, '; ')}. "
        f"Submit the same {aspect} under this name on every rank"
    )
    return Disagreement(text, aspect, tuple((rank, str(value)) for rank, value in values.items()), name)


def with_ranks(values: Mapping[int, object], separator: str = ", ") -> str:
    """``int32 on rank 0, float32 on ranks 1, 2``: each value of ``values``, rank -> value, once, with its ranks."""
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return separator.join(f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``; a long list is cut short."""
    listed = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def sizes(requests: Mapping[int, Request], members: Sequence[int]) -> tuple[int, ...]:
    """Sizes that members need of each other: first dimensions (allgather), all splits (alltoall), else none.

    ``members`` without a request have joined, and bring no rows.
    """
    operation = next(iter(requests.values())).operation
    if operation is Operation.ALLGATHER:
        return tuple(requests[rank].shape[0] if rank in requests else 0 for rank in members)
    if operation is Operation.ALLTOALL:
        nothing = (0,) * len(members)
        return tuple(count for rank in members for count in (requests[rank].splits if rank in requests else nothing))
    return ()


def offers(first: Request, requests: Mapping[int, Request]) -> tuple[bytes, ...]:
    """The addresses of the members of a process set that is added, in set order; else none."""
    if first.operation is not Operation.ADD_PROCESS_SET:
        return ()
    return tuple(requests[rank].offer for rank in first.splits)
