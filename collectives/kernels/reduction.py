"""NumPy kernels over flat arrays in ``DType.storage`` layout: combine, scale, widen 16-bit floats. Pure.

The rules, the same in every backend:

* Inputs are combined strictly in the order given, so members that see the same inputs get the same bits.
* 16-bit floats are computed in float32 and rounded once, to nearest even, when the result is stored.
* Integers wrap. Scaling one computes in float64, truncates towards zero and wraps.
* AVERAGE is for integers only: the exact sum, in 64 bits, divided by the number of inputs and truncated towards zero.
  It needs all inputs at once. For floats it is SUM with a postscale.
* Complex numbers come as pairs of reals, see :attr:`collectives.api.DType.real`.
* For bool, SUM and MAX mean "any", PRODUCT and MIN mean "all"; scaling one is refused.
* MIN and MAX give NaN where an input is NaN. Overflow gives infinity, without a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import DType, EngineError, InvalidRequestError, ReduceOp

__all__ = ["CHUNK", "INTEGERS", "Reduction", "narrow", "reduce_arrays", "scale_array", "widen"]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Scale = Callable[[Array, Array, float], None]

CHUNK = 1 << 15
"""Elements per round: two float32 temporaries and the operands stay in a level-2 cache of 1 MiB."""

NATIVE_FLOAT16_LIMIT = 2048
"""Below this many elements NumPy's own slow conversion beats the call overhead of the bit tricks."""

# Operands as arrays, because NumPy converts a Python int anew in each call, which takes as long as a small operation.
_ONE, _SIXTEEN, _BELOW_HALF = (np.array(number, np.uint32) for number in (1, 16, 0x7FFF))


@np.errstate(all="ignore")
def reduce_arrays(
    out: Array, inputs: Sequence[Array], dtype: DType, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
) -> None:
    """out = postscale * op(prescale * inputs[0], prescale * inputs[1], ...), left to right.

    ``out`` may be the same memory as any of the inputs. Two unscaled inputs of a type that needs no widening cost one
    ufunc call and no temporary.
    """
    Reduction(dtype, op, prescale, postscale).combine(out, inputs)


class Reduction:
    """What :func:`reduce_arrays` does, prepared for many calls; may warn of overflow, where that does not."""

    def __init__(self, dtype: DType, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> None:
        averages = op is ReduceOp.AVERAGE and dtype in INTEGERS
        kernel = _AVERAGING if averages else _KERNELS[dtype.label]
        combine = kernel.combine.get(op)
        if combine is None:
            raise EngineError(
                f"{op!r} does not combine elements of {dtype.label}; allowed: SUM, MIN, MAX, PRODUCT, and for integers "
                "AVERAGE"
            )
        if dtype is DType.BOOL and not prescale == postscale == 1.0:
            raise _bool_scaling(prescale, postscale)
        self.dtype = dtype
        self._kernel = kernel
        self._ufunc = combine
        self._prescale = prescale
        self._postscale = postscale
        self._averages = averages
        self._folds = kernel.native and prescale == 1.0

    def combine(self, out: Array, inputs: Sequence[Array]) -> None:
        """out = the scaled combination of ``inputs``, any of which may be ``out``."""
        if not self._folds:
            store = partial(_store_average, len(inputs)) if self._averages else self._kernel.store
            _accumulate(self._kernel, self._ufunc, out, inputs, self._prescale, self._postscale, store)
        elif self._postscale == 1.0 and len(inputs) == 2:
            self._ufunc(inputs[0], inputs[1], out=out)
        else:
            _fold(self._kernel, self._ufunc, out, inputs, self._postscale)


def scale_array(source: Array, out: Array, dtype: DType, factor: float) -> None:
    """out = factor * source; a plain copy for 1.0. ``out`` may be ``source``."""
    if factor != 1.0:
        _scale_array(source, out, dtype, factor)
    elif not np.may_share_memory(source, out):
        np.copyto(out, source)


def widen(source: Array, dtype: DType, out: Float32 | None = None) -> Float32:
    """The 16-bit floats ``source`` as float32, exactly; in ``out`` if that is given."""
    result = np.empty(source.size, np.float32) if out is None else out
    load = _KERNELS[dtype.label].load
    for target, (piece,) in _chunks(result, (source,)):
        load(piece, target, 1.0)
    return result


@np.errstate(all="ignore")
def narrow(source: Float32, out: Array, dtype: DType) -> None:
    """out = ``source`` rounded to the 16-bit float ``dtype``, to nearest even; NaN stays NaN."""
    store = _KERNELS[dtype.label].store
    for target, (piece,) in _chunks(out, (source,)):
        store(piece, target, 1.0)


@np.errstate(all="ignore")
def _scale_array(source: Array, out: Array, dtype: DType, factor: float) -> None:
    if dtype is DType.BOOL:
        raise _bool_scaling(factor)
    kernel = _KERNELS[dtype.label]
    if kernel.native:
        for target, (piece,) in _chunks(out, (source,)):
            kernel.load(piece, target, factor)
    else:
        _accumulate(kernel, np.add, out, (source,), factor, 1.0, kernel.store)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What one dtype needs: ufuncs over ``accumulator`` elements, and the ways there and back.

    ``load(source, scratch, factor)`` and ``store(total, out, factor)`` scale on the way; they are the same function
    where the accumulator has the storage type (``native``).
    """

    combine: Mapping[ReduceOp, np.ufunc]
    accumulator: str
    load: Scale
    store: Scale
    native: bool = True


def _fold(kernel: _Kernel, combine: np.ufunc, out: Array, inputs: Sequence[Array], postscale: float) -> None:
    """Combine straight into ``out``, or beside it where a later input lies in the same memory."""
    aliased = any(np.may_share_memory(out, later) for later in inputs[2:])
    scratch = np.empty(min(out.size, CHUNK), out.dtype) if aliased else None
    for target, pieces in _chunks(out, inputs):
        total = target if scratch is None else scratch[: target.size]
        if len(pieces) == 1:
            total = pieces[0]
        else:
            combine(pieces[0], pieces[1], out=total)
        for piece in pieces[2:]:
            combine(total, piece, out=total)
        kernel.store(total, target, postscale)


def _accumulate(
    kernel: _Kernel,
    combine: np.ufunc,
    out: Array,
    inputs: Sequence[Array],
    prescale: float,
    postscale: float,
    store: Scale,
) -> None:
    """Load, scale and combine in temporaries of one chunk; ``out`` is written last, so it may be any input."""
    length = min(out.size, CHUNK)
    totals, terms = np.empty(length, kernel.accumulator), np.empty(length, kernel.accumulator)
    for target, pieces in _chunks(out, inputs):
        total, term = totals[: target.size], terms[: target.size]
        kernel.load(pieces[0], total, prescale)
        for piece in pieces[1:]:
            kernel.load(piece, term, prescale)
            combine(total, term, out=total)
        store(total, target, postscale)


def _chunks(out: Array, inputs: Sequence[Array]) -> Iterator[tuple[Array, Sequence[Array]]]:
    if out.size <= CHUNK:
        yield out, inputs
        return
    for start in range(0, out.size, CHUNK):
        piece = slice(start, start + CHUNK)
        yield out[piece], [array[piece] for array in inputs]


def _bool_scaling(*factors: float) -> InvalidRequestError:
    scale = " and ".join(str(factor) for factor in factors if factor != 1.0)
    return InvalidRequestError(
        f"a bool tensor cannot be scaled (or averaged) by {scale}; use SUM or MAX for any, MIN or PRODUCT for all, "
        "or convert the tensor to a float type"
    )


def _scale_native(source: Array, out: Array, factor: float) -> None:
    if factor != 1.0:
        np.multiply(source, factor, out=out)
    elif source is not out:
        np.copyto(out, source)


def _scale_integer(source: Array, out: Array, factor: float) -> None:
    if factor == 1.0:
        _scale_native(source, out, factor)
        return
    # By way of int64, because a float beyond the range of a small integer has no defined conversion; int64 wraps.
    scaled = np.multiply(source, factor, dtype=np.float64)
    out[...] = scaled.astype(np.int64)


def _store_average(count: int, total: Array, out: Array, factor: float) -> None:
    """Divide as integers: the reciprocal of 49, say, is no float64, and 49 times 100 times it is less than 100."""
    if factor != 1.0:
        out[...] = np.divide(np.multiply(total, factor, dtype=np.float64), count).astype(np.int64)
        return
    quotient, rest = np.divmod(total, count)
    out[...] = np.add(quotient, (rest != 0) & (total < 0), out=quotient)


def _load_float16(source: Array, out: Array, factor: float) -> None:
    _widen_float16(source, out)
    if factor != 1.0:
        np.multiply(out, factor, out=out)


def _store_float16(total: Array, out: Array, factor: float) -> None:
    if factor != 1.0:
        total = np.multiply(total, factor)
    _narrow_float16(total, out)


def _load_bfloat16(source: Array, out: Array, factor: float) -> None:
    bits = out.view(np.uint32)
    bits[...] = source
    np.left_shift(bits, _SIXTEEN, out=bits)
    if factor != 1.0:
        np.multiply(out, factor, out=out)


def _store_bfloat16(total: Array, out: Array, factor: float) -> None:
    if factor != 1.0:
        total = np.multiply(total, factor)
    bits = total.view(np.uint32)
    rounded = np.right_shift(bits, _SIXTEEN)
    np.bitwise_and(rounded, _ONE, out=rounded)
    np.add(rounded, _BELOW_HALF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, _SIXTEEN, out=rounded)
    if np.isnan(np.maximum.reduce(total, initial=0.0)):
        # The carry of the rounding could turn a NaN into infinity or zero: truncate it, and keep it quiet.
        np.copyto(rounded, (bits >> _SIXTEEN) | 0x40, where=np.isnan(total))
    out[...] = rounded


def _widen_float16(source: Array, out: Array) -> None:
    """Shift the 15 magnitude bits and the sign into place and correct the exponent's bias by a multiplication.

    That holds for zero, subnormal and normal numbers. Infinity and NaN come out as 65536 or more: NumPy does those.
    """
    if source.size >= NATIVE_FLOAT16_LIMIT:
        bits = out.view(np.int32)
        bits[...] = source.view(np.int16)
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, -0x70002000, out=bits)
        np.multiply(out, 2.0**112, out=out)
        if out.min() > -65536.0 and out.max() < 65536.0:
            return
    out[...] = source


def _narrow_float16(source: Array, out: Array) -> None:
    """Add a power of two 13 bits above each number's own, so that the float32 addition itself rounds to 10 bits.

    The bits of the sum less those of the power are the rounded mantissa with its leading one; the exponent (of the
    smallest normal number for subnormal ones) is added back. What rounds to infinity, and NaN, is left to NumPy.
    """
    if source.size < NATIVE_FLOAT16_LIMIT or not (source.min() > -65520.0 and source.max() < 65520.0):
        out[...] = source
        return
    power = np.bitwise_and(source.view(np.uint32), 0x7F800000)
    np.maximum(power, 0x38800000, out=power)
    np.add(power, 13 << 23, out=power)
    total = np.abs(source)
    np.add(total, power.view(np.float32), out=total)
    bits = total.view(np.uint32)
    np.subtract(bits, power, out=bits)
    np.right_shift(power, 13, out=power)
    np.add(bits, power, out=bits)
    half = out.view(np.uint16)
    half[...] = bits
    np.subtract(half, (126 << 10) & 0xFFFF, out=half)
    np.right_shift(source.view(np.uint32), 16, out=power)
    np.bitwise_and(power, 0x8000, out=power)
    np.bitwise_or(half, power.astype(np.uint16), out=half)


_ARITHMETIC = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
_LOGIC = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
}
INTEGERS = (DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64)
_AVERAGING = _Kernel({ReduceOp.AVERAGE: np.add}, "int64", _scale_integer, _scale_integer, native=False)

# By label: hashing an enum member is a Python call.
_KERNELS: Mapping[str, _Kernel] = {
    **{dtype.label: _Kernel(_ARITHMETIC, dtype.storage, _scale_integer, _scale_integer) for dtype in INTEGERS},
    "float16": _Kernel(_ARITHMETIC, "float32", _load_float16, _store_float16, native=False),
    "bfloat16": _Kernel(_ARITHMETIC, "float32", _load_bfloat16, _store_bfloat16, native=False),
    "float32": _Kernel(_ARITHMETIC, "float32", _scale_native, _scale_native),
    "float64": _Kernel(_ARITHMETIC, "float64", _scale_native, _scale_native),
    "bool": _Kernel(_LOGIC, "bool", _scale_native, _scale_native),
}
