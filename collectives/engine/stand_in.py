"""What a rank that has joined brings to a collective of the others: nothing that changes the result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from collectives import buffers
from collectives.api import DType, Operation, ReduceOp
from collectives.engine.work import Work
from collectives.planning.messages import Response

__all__ = ["neutral", "stand_in"]

REDUCTIONS = frozenset({Operation.ALLREDUCE, Operation.REDUCESCATTER})
EMPTY_HANDED = frozenset({Operation.ALLGATHER, Operation.ALLTOALL})
BFLOAT16 = {ReduceOp.MIN: 0x7F80, ReduceOp.MAX: 0xFF80, ReduceOp.PRODUCT: 0x3F80}
"""Infinity, minus infinity and one."""


def stand_in(response: Response, size: int) -> Work:
    """The part of a rank without data in a collective of ``size`` members; its result is for nobody.

    Zeros to a sum or an average, which still divides by the full size; no rows to what gathers them; and to MIN, MAX
    and PRODUCT, where zeros would decide the result, the value that changes nothing.
    """
    request = response.request
    if request.operation in EMPTY_HANDED:
        request = replace(request, shape=(0, *request.shape[1:]), splits=(0,) * size)
    source = buffers.empty(request.dtype, request.shape)
    if request.operation in REDUCTIONS:
        source.host[:] = neutral(request.op, request.dtype)
    return Work(request, source, lambda shape: buffers.empty(request.dtype, shape))


def neutral(op: ReduceOp, dtype: DType) -> float:
    """The element of ``dtype.storage`` that leaves every other as it is under ``op``."""
    if op not in BFLOAT16:
        return 0
    if dtype is DType.BFLOAT16:
        return BFLOAT16[op]
    if op is ReduceOp.PRODUCT:
        return 1
    if dtype is DType.BOOL:
        return op is ReduceOp.MIN
    kind = np.dtype(dtype.storage)
    if kind.kind == "f":
        return np.inf if op is ReduceOp.MIN else -np.inf
    return int(np.iinfo(kind).max if op is ReduceOp.MIN else np.iinfo(kind).min)
