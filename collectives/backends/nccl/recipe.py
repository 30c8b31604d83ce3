"""How a reduction runs on NCCL, which lacks some types and treats NaN differently from this project. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from collectives.api import DType, ReduceOp
from collectives.backends.nccl.library import Combine
from collectives.kernels.reduction import reduction

__all__ = ["BYTES", "Conversion", "Recipe", "recipe"]

KEPT = 1 << 8
_COMBINES = {
    ReduceOp.SUM: Combine.SUM,
    ReduceOp.AVERAGE: Combine.SUM,
    ReduceOp.PRODUCT: Combine.PRODUCT,
    ReduceOp.MIN: Combine.MIN,
    ReduceOp.MAX: Combine.MAX,
}
_LOGIC = {
    ReduceOp.SUM: Combine.MAX,
    ReduceOp.MAX: Combine.MAX,
    ReduceOp.PRODUCT: Combine.MIN,
    ReduceOp.MIN: Combine.MIN,
}
_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Numbers of ``dtype`` travel as numbers of ``carrier``.

    With ``key``, MIN or MAX, floats travel as integers of the same order. A NaN is then the lowest or the highest one,
    because NCCL drops NaN. -0 is below 0. Numbers that come back are divided by ``divisor`` and truncated towards zero.
    """

    dtype: DType
    carrier: DType
    key: ReduceOp | None = None
    divisor: int = 1

    @property
    def is_copy(self) -> bool:
        """Whether the bytes stay the same, on both ways."""
        return self.divisor == 1 and (self.carrier is self.dtype or self.dtype is DType.BOOL)


BYTES = Conversion(DType.UINT8, DType.UINT8)
"""What is moved only."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Scale by ``before``, convert, let NCCL ``combine``, convert back, scale by ``after``."""

    conversion: Conversion
    combine: Combine
    before: float
    after: float

    @property
    def is_native(self) -> bool:
        """Whether NCCL can work on the memory of the tensors."""
        return self.conversion.is_copy


@lru_cache(KEPT)
def recipe(dtype: DType, op: ReduceOp, prescale: float, postscale: float, size: int) -> Recipe:
    """How ``size`` members compute postscale * op(prescale * tensor).

    Raises EngineError and InvalidRequestError for what no backend computes.
    """
    reduction(dtype, op, prescale, postscale)  # which refuses it
    if dtype is DType.BOOL:
        return Recipe(Conversion(dtype, DType.UINT8), _LOGIC[op], 1.0, 1.0)
    if op is ReduceOp.SUM and postscale == 1.0 / size and _averages(dtype, size):
        return Recipe(Conversion(dtype, dtype), Combine.AVERAGE, prescale, 1.0)
    return Recipe(_conversion(dtype, op, size), _COMBINES[op], prescale, postscale)


def _averages(dtype: DType, size: int) -> bool:
    """Whether NCCL's average is as exact as a sum that is scaled.

    NCCL multiplies each input by 1 / size in the type of the tensor. With 16 bits, this is exact for powers of two.
    """
    return dtype in (DType.FLOAT32, DType.FLOAT64) or (not dtype.is_integer and size & (size - 1) == 0)


def _conversion(dtype: DType, op: ReduceOp, size: int) -> Conversion:
    if op is ReduceOp.AVERAGE:  # of integers only
        return Conversion(dtype, DType.INT64, divisor=size)
    if op in _EXTREMES and not dtype.is_integer:
        return Conversion(dtype, DType.INT64 if dtype is DType.FLOAT64 else DType.INT32, op)
    return Conversion(dtype, DType.INT32 if dtype is DType.INT16 else dtype)
