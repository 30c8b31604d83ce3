"""NumPy kernels over flat arrays in ``DType.storage`` layout: combine and scale. Pure.

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
from functools import lru_cache, partial

import numpy as np

from collectives.api import DType, EngineError, InvalidRequestError, ReduceOp, override
from collectives.kernels.conversion import CHUNK, Array, Conversion, Float32, conversion

__all__ = ["CHUNK", "INTEGERS", "ReductionKernel", "narrow", "reduction", "scale_array", "widen"]

Scale = Callable[[Array, Array, float], None]

KEPT_REDUCTIONS = 1 << 8


class ReductionKernel:
    """postscale * op(prescale * inputs[0], prescale * inputs[1], ...) of elements of ``dtype``, left to right.

    Two unscaled inputs of a type that needs no widening cost one ufunc call and no temporary.
    """

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
        self.op = op
        self.prescale = prescale
        self.postscale = postscale
        self._is_half = conversion(dtype.label) is not None
        self._kernel = kernel
        self._ufunc = combine
        self._averages = averages
        self._folds = kernel.native and prescale == 1.0

    @override
    def __eq__(self, other: object) -> bool:
        """Whether both do the same: threads that ask for a kernel at once may get two."""
        return isinstance(other, ReductionKernel) and self._arguments == other._arguments

    @override
    def __hash__(self) -> int:
        return hash(self._arguments)

    @property
    def _arguments(self) -> tuple[DType, ReduceOp, float, float]:
        return self.dtype, self.op, self.prescale, self.postscale

    @np.errstate(all="ignore")
    def combine_silently(self, out: Array, inputs: Sequence[Array]) -> None:
        """The same as :meth:`combine`, without a warning."""
        self.combine(out, inputs)

    def combine(self, out: Array, inputs: Sequence[Array]) -> None:
        """out = the scaled combination of ``inputs``, any of which may be ``out``. It may warn of overflow."""
        if self._is_half:
            _combine_halves(_conversion(self.dtype), self._ufunc, out, inputs, self.prescale, self.postscale)
        elif not self._folds:
            store = partial(_store_average, len(inputs)) if self._averages else self._kernel.store
            _accumulate(self._kernel, self._ufunc, out, inputs, self.prescale, self.postscale, store)
        elif len(inputs) == 2 and (self.postscale == 1.0 or out.size <= CHUNK):
            self._ufunc(inputs[0], inputs[1], out=out)
            if self.postscale != 1.0:
                self._kernel.store(out, out, self.postscale)
        elif len(inputs) == 1 and out.size <= CHUNK:
            self._kernel.store(inputs[0], out, self.postscale)
        else:
            _fold(self._kernel, self._ufunc, out, inputs, self.postscale)


reduction = lru_cache(maxsize=KEPT_REDUCTIONS)(ReductionKernel)
"""The :class:`ReductionKernel` of these arguments; those of the last calls are kept."""


def scale_array(source: Array, out: Array, dtype: DType, factor: float) -> None:
    """out = factor * source; a plain copy for 1.0. ``out`` may be ``source``."""
    if factor != 1.0:
        _scale_array(source, out, dtype, factor)
    elif not np.may_share_memory(source, out):
        np.copyto(out, source)


def widen(source: Array, dtype: DType, out: Float32 | None = None) -> Float32:
    """The 16-bit floats ``source`` as float32, exactly; in ``out`` if that is given."""
    result = np.empty(source.size, np.float32) if out is None else out
    halves = _conversion(dtype)
    for piece, target in zip(halves.halves(source), halves.floats(result), strict=True):
        halves.widen(piece, target)
    return result


@np.errstate(all="ignore")
def narrow(source: Float32, out: Array, dtype: DType) -> None:
    """out = ``source`` rounded to the 16-bit float ``dtype``, to nearest even; NaN stays NaN."""
    halves = _conversion(dtype)
    for piece, target in zip(halves.floats(source), halves.halves(out), strict=True):
        halves.narrow(piece, target)


def _conversion(dtype: DType) -> Conversion:
    found = conversion(dtype.label)
    if found is None:
        raise EngineError(f"{dtype.label} is not a 16-bit float; only these are widened and narrowed")
    return found


@np.errstate(all="ignore")
def _scale_array(source: Array, out: Array, dtype: DType, factor: float) -> None:
    if dtype is DType.BOOL:
        raise _bool_scaling(factor)
    kernel, halves = _KERNELS[dtype.label], conversion(dtype.label)
    if halves is not None:
        _combine_halves(halves, np.add, out, (source,), factor, 1.0)
    elif kernel.native:
        for target, (piece,) in _chunks(out, (source,)):
            kernel.load(piece, target, factor)
    else:
        _accumulate(kernel, np.add, out, (source,), factor, 1.0, kernel.store)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The functions for one dtype: ufuncs over ``accumulator`` elements, and the conversions to them and back.

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
    aliased = any([np.may_share_memory(out, later) for later in inputs[2:]])
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


def _combine_halves(
    halves: Conversion, combine: np.ufunc, out: Array, inputs: Sequence[Array], prescale: float, postscale: float
) -> None:
    """As :func:`_accumulate`, in float32 and with less work around each chunk."""
    if halves.add is not None and combine is np.add and len(inputs) == 2 and prescale == postscale == 1.0:
        for target, first, second in zip(*map(halves.halves, (out, *inputs)), strict=True):
            halves.add(first, second, target)
        return
    mean = halves.mean if combine is np.add and len(inputs) == 2 and (prescale, postscale) == (1.0, 0.5) else None
    left, temporaries = out.size, None
    try:
        for target, first, *others in zip(*map(halves.halves, (out, *inputs)), strict=True):
            if mean is None or not mean(first, others[0], target):
                temporaries = temporaries or halves.temporaries()
                (total, total_piece), (term, term_piece) = halves.starts(temporaries, min(left, CHUNK))
                halves.widen(first, total_piece)
                _scale_native(total, total, prescale)
                for other in others:
                    halves.widen(other, term_piece)
                    _scale_native(term, term, prescale)
                    combine(total, term, out=total)
                _scale_native(total, total, postscale)
                halves.narrow(total_piece, target)
            left -= CHUNK
    finally:
        if temporaries is not None:
            halves.spare.append(temporaries)


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
    # Through int64, because a float beyond the range of a small integer has no defined conversion; int64 wraps.
    scaled = np.multiply(source, factor, dtype=np.float64)
    out[...] = scaled.astype(np.int64)


def _store_average(count: int, total: Array, out: Array, factor: float) -> None:
    """Divide as integers: the reciprocal of 49, for example, is no float64, and 49 times 100 times it is below 100."""
    if factor != 1.0:
        out[...] = np.divide(np.multiply(total, factor, dtype=np.float64), count).astype(np.int64)
        return
    quotient, rest = np.divmod(total, count)
    out[...] = np.add(quotient, (rest != 0) & (total < 0), out=quotient)


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
HALVES = (DType.FLOAT16, DType.BFLOAT16)
INTEGERS = (DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64)
_AVERAGING = _Kernel({ReduceOp.AVERAGE: np.add}, "int64", _scale_integer, _scale_integer, native=False)

_KERNELS: Mapping[str, _Kernel] = {
    **{dtype.label: _Kernel(_ARITHMETIC, dtype.storage, _scale_integer, _scale_integer) for dtype in INTEGERS},
    **{dtype.label: _Kernel(_ARITHMETIC, "float32", _scale_native, _scale_native) for dtype in HALVES},
    "float32": _Kernel(_ARITHMETIC, "float32", _scale_native, _scale_native),
    "float64": _Kernel(_ARITHMETIC, "float64", _scale_native, _scale_native),
    "bool": _Kernel(_LOGIC, "bool", _scale_native, _scale_native),
}
