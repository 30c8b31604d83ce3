"""How reductions are mapped to what NCCL can do."""

from __future__ import annotations

import pytest

from collectives.api import DType, EngineError, InvalidRequestError, ReduceOp
from collectives.backends.nccl.interface import CODES, Combine, recipe

REAL = [dtype for dtype in DType if dtype.real is dtype]
FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", REAL, ids=lambda dtype: dtype.label)
def test_every_carrier_is_a_type_of_nccl(dtype, op):
    assert recipe(dtype, op, 1.0, 1.0, 3).conversion.carrier in CODES


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
def test_a_sum_of_floats_needs_no_conversion(dtype):
    how = recipe(dtype, ReduceOp.SUM, 0.5, 2.0, 3)
    assert how.is_native
    assert (how.combine, how.before, how.after) == (Combine.SUM, 0.5, 2.0)


@pytest.mark.parametrize(
    ("dtype", "size", "combine", "after"),
    [
        (DType.FLOAT32, 3, Combine.AVERAGE, 1.0),
        (DType.BFLOAT16, 4, Combine.AVERAGE, 1.0),
        (DType.BFLOAT16, 3, Combine.SUM, 1 / 3),
        (DType.FLOAT16, 6, Combine.SUM, 1 / 6),
        (DType.INT32, 4, Combine.SUM, 1 / 4),
    ],
)
def test_nccl_averages_where_it_is_exact(dtype, size, combine, after):
    how = recipe(dtype, ReduceOp.SUM, 1.0, 1 / size, size)
    assert (how.combine, how.after) == (combine, after)


def test_the_average_of_integers_is_exact():
    how = recipe(DType.INT8, ReduceOp.AVERAGE, 1.0, 1.0, 3)
    assert (how.conversion.carrier, how.conversion.divisor, how.combine) == (DType.INT64, 3, Combine.SUM)
    assert not how.is_native


def test_a_bool_is_a_byte():
    assert recipe(DType.BOOL, ReduceOp.SUM, 1.0, 1.0, 2).combine is Combine.MAX
    assert recipe(DType.BOOL, ReduceOp.PRODUCT, 1.0, 1.0, 2).combine is Combine.MIN
    assert recipe(DType.BOOL, ReduceOp.SUM, 1.0, 1.0, 2).is_native
    with pytest.raises(InvalidRequestError, match="bool tensor cannot be scaled"):
        recipe(DType.BOOL, ReduceOp.SUM, 1.0, 0.5, 2)


def test_what_no_backend_computes_is_refused():
    with pytest.raises(EngineError, match="does not combine elements of float32"):
        recipe(DType.FLOAT32, ReduceOp.AVERAGE, 1.0, 1.0, 2)
