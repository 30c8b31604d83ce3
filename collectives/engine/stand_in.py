"""The part of a joined rank in a collective of the others: data that does not change the result."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from collectives.api import DType, Operation, ReduceOp
from collectives.backends.memory import Memory
from collectives.engine.work import Work
from collectives.planning.messages import Response

__all__ = ["neutral", "stand_in"]

REDUCTIONS = frozenset({Operation.ALLREDUCE, Operation.REDUCESCATTER})
WITHOUT_ROWS = frozenset({Operation.ALLGATHER, Operation.ALLTOALL})


def stand_in(response: Response, size: int, memory: Memory) -> Work:
    """The part of a rank without data in a collective of ``size`` members, in ``memory``; its result is not used.

    It consists of zeros for a sum or an average, which still divides by the full size; of no rows for an allgather or
    alltoall; and for MIN, MAX and PRODUCT, where zeros would decide the result, of the neutral value.
    """
    request = response.request
    if request.operation in WITHOUT_ROWS:
        request = replace(request, shape=(0, *request.shape[1:]), splits=(0,) * size)
    source = memory.empty(request.dtype, request.shape)
    if request.operation in REDUCTIONS:
        memory.fill(source, neutral(request.op, request.dtype))
    return Work(request, source, lambda shape: memory.empty(request.dtype, shape))


def neutral(op: ReduceOp, dtype: DType) -> float:
    """The neutral number of ``dtype`` under ``op``."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    if dtype is DType.BOOL:
        return op is ReduceOp.MIN
    if not dtype.is_integer:
        return inf if op is ReduceOp.MIN else -inf
    bits = 8 * dtype.itemsize
    lowest, highest = (0, 2**bits - 1) if dtype is DType.UINT8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return highest if op is ReduceOp.MIN else lowest
