"""The shapes of outputs, as far as they are known before an op runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hvd_cluster.tensorflow.native.library import SHAPE, calls

Function: TypeAlias = Callable[[int, int], None]

UNKNOWN = (1 << 64) - 1
"""The size -1 as an unsigned number."""
END = (1 << 63) - 1


def _set(context: int, index: int, handle: int, status: int) -> None:
    calls.TF_ShapeInferenceContextSetOutput(context, index, handle, status)
    calls.TF_DeleteShapeHandle(handle)


def _input(context: int, index: int, status: int) -> int:
    handle: int = calls.TF_NewShapeHandle()
    calls.TF_ShapeInferenceContextGetInput(context, index, handle, status)
    return handle


def _with_other_rows(context: int, shape: int, status: int) -> int:
    """``shape``, which is deleted, with an unknown first dimension. A scalar, which has none, is an error of the op."""
    known = calls.TF_ShapeInferenceContextRankKnown(context, shape)
    if not known or not calls.TF_ShapeInferenceContextRank(context, shape):
        return shape
    rows = calls.TF_ShapeInferenceContextVectorFromSize(context, UNKNOWN)
    rest, result = calls.TF_NewShapeHandle(), calls.TF_NewShapeHandle()
    calls.TF_ShapeInferenceContextSubshape(context, shape, 1, END, rest, status)
    calls.TF_ShapeInferenceContextConcatenateShapes(context, rows, rest, result, status)
    for handle in (shape, rows, rest):
        calls.TF_DeleteShapeHandle(handle)
    return int(result)


def _same(context: int, status: int) -> None:
    for index in range(calls.TF_ShapeInferenceContextNumInputs(context)):
        _set(context, index, _input(context, index, status), status)


def _other_rows(context: int, status: int) -> None:
    for index in range(calls.TF_ShapeInferenceContextNumInputs(context)):
        _set(context, index, _with_other_rows(context, _input(context, index, status), status), status)


def _gathered(context: int, status: int) -> None:
    _other_rows(context, status)
    places = calls.TF_ShapeInferenceContextNumInputs(context)
    pair, rows = (calls.TF_ShapeInferenceContextVectorFromSize(context, size) for size in (2, places))
    shape = calls.TF_NewShapeHandle()
    calls.TF_ShapeInferenceContextConcatenateShapes(context, rows, pair, shape, status)
    for handle in (rows, pair):
        calls.TF_DeleteShapeHandle(handle)
    _set(context, places, shape, status)


def _scalar(context: int, status: int) -> None:
    _set(context, 0, calls.TF_ShapeInferenceContextScalar(context), status)


def _rows_and_vector(context: int, status: int) -> None:
    _set(context, 0, _with_other_rows(context, _input(context, 0, status), status), status)
    _set(context, 1, calls.TF_ShapeInferenceContextVectorFromSize(context, UNKNOWN), status)


same: Function = SHAPE(_same)
"""Each output has the shape of the input of its number."""
other_rows: Function = SHAPE(_other_rows)
"""As :data:`same`, but with an unknown first dimension."""
gathered: Function = SHAPE(_gathered)
"""As :data:`other_rows`; the last output has a row of two numbers for each input."""
rows_and_vector: Function = SHAPE(_rows_and_vector)
"""The first output is the first input with an unknown first dimension, the second a vector of unknown length."""
scalar: Function = SHAPE(_scalar)
"""The only output is a scalar."""
