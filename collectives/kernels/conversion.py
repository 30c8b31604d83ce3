"""16-bit floats to float32 and back: NumPy's bit operations, or a faster pair of functions that a binding registers.

NumPy converts float16 one number at a time and does not know bfloat16. A framework that is loaded anyway often has
vectorised conversions. All implementations give the same bits, except those of a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import DType, InvalidRequestError

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

CHUNK = 1 << 15
"""Elements that the kernels work on at a time: two float32 temporaries and the operands stay in a level-2 cache of 1
MiB."""

NATIVE_FLOAT16_LIMIT = 2048
"""Below this many elements NumPy's own slow conversion beats the call overhead of the bit operations."""

# Operands as arrays, because NumPy converts a Python int anew in each call, which takes as long as a small operation.
_ONE, _SIXTEEN, _BELOW_HALF = (np.array(number, np.uint32) for number in (1, 16, 0x7FFF))


Temporary = tuple[Float32, Any]


def _pieces(array: Array) -> list[Array]:
    return [array[start : start + CHUNK] for start in range(0, array.size, CHUNK)]


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one 16-bit float dtype becomes float32 and back.

    ``widen(half, float)`` is exact. ``narrow(float, half)`` rounds to nearest even; a NaN stays a NaN. The two pieces
    have equal lengths and do not overlap. ``add(first, second, half)``, where there is one, adds two halves in float32
    and rounds once; the result may be one of them. ``mean`` averages them likewise; it returns False, and has written
    nothing, for numbers that it cannot average. No function changes a source otherwise, and none starts threads. Any
    thread may call them, several at a time.

    A piece is what ``halves`` or ``floats`` make of a flat array: its views of CHUNK elements, the last of which may be
    shorter. So an implementation may use objects of its own, and makes them once for a whole array. Arrays of 16-bit
    floats are in ``DType.storage`` layout; a source may be read-only.
    """

    widen: Callable[[Any, Any], None]
    narrow: Callable[[Any, Any], None]
    halves: Callable[[Array], Sequence[Any]] = _pieces
    floats: Callable[[Float32], Sequence[Any]] = _pieces
    add: Callable[[Any, Any, Any], None] | None = None
    mean: Callable[[Any, Any, Any], bool] | None = None
    spare: list[tuple[Temporary, Temporary]] = field(default_factory=list, init=False, repr=False, compare=False)

    def temporaries(self) -> tuple[Temporary, Temporary]:
        """Two arrays of CHUNK elements and their pieces, which nobody else has until the caller adds them to ``spare``.

        They are kept there, because fresh memory costs a page fault for each 4 KB. The thread does not keep them: where
        a thread of a framework calls Python, all that Python has kept for it ends with the call, and the end of a
        tensor of torch at that moment corrupts memory.
        """
        try:
            return self.spare.pop()
        except IndexError:
            first, second = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
            return (first, self.floats(first)[0]), (second, self.floats(second)[0])

    def starts(self, temporaries: tuple[Temporary, Temporary], count: int) -> tuple[Temporary, Temporary]:
        """The first ``count`` elements, 1 to CHUNK, of both."""
        if count == CHUNK:
            return temporaries
        first, second = temporaries[0][0][:count], temporaries[1][0][:count]
        return (first, self.floats(first)[0]), (second, self.floats(second)[0])


def conversion(label: str) -> Conversion | None:
    """The conversion that is in use for the dtype with this label; None for dtypes that are not converted."""
    return _in_use.get(label)


def register(dtype: DType, faster: Conversion) -> None:
    """Use ``faster`` for ``dtype`` in this process from now on; InvalidRequestError for a dtype without conversion."""
    if dtype.label not in NUMPY:
        raise InvalidRequestError(f"{dtype.label} is not converted to float32; register {' or '.join(NUMPY)}")
    _in_use[dtype.label] = faster


def _widen_bfloat16(source: Array, out: Float32) -> None:
    bits = out.view(np.uint32)
    bits[...] = source
    np.left_shift(bits, _SIXTEEN, out=bits)


def _narrow_bfloat16(source: Float32, out: Array) -> None:
    bits = source.view(np.uint32)
    rounded = np.right_shift(bits, _SIXTEEN)
    np.bitwise_and(rounded, _ONE, out=rounded)
    np.add(rounded, _BELOW_HALF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, _SIXTEEN, out=rounded)
    if np.isnan(np.maximum.reduce(source, initial=0.0)):
        # The carry of the rounding could turn a NaN into infinity or zero: truncate it, and keep it quiet.
        np.copyto(rounded, (bits >> _SIXTEEN) | 0x40, where=np.isnan(source))
    out[...] = rounded


def _widen_float16(source: Array, out: Float32) -> None:
    """Shift the 15 magnitude bits and the sign into place and correct the exponent's bias by a multiplication.

    That holds for zero, subnormal and normal numbers. Infinity and NaN come out as 65536 or more: NumPy converts those.
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


def _narrow_float16(source: Float32, out: Array) -> None:
    """Add a power of two 13 bits above each number's own, so that the float32 addition itself rounds to 10 bits.

    The bits of the sum less those of the power are the rounded mantissa with its leading one; the exponent (of the
    smallest normal number for subnormal ones) is added back. NumPy converts NaN and numbers that round to infinity.
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


NUMPY = {
    "float16": Conversion(_widen_float16, _narrow_float16),
    "bfloat16": Conversion(_widen_bfloat16, _narrow_bfloat16),
}
"""The default implementations, by the label of the dtype."""

_in_use: dict[str, Conversion] = dict(NUMPY)
