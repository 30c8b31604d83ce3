"""torch's vectorised conversions of 16-bit floats, for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from collectives import DType, conversion

Array = npt.NDArray[Any]
Pieces = Sequence[torch.Tensor]


def register() -> None:
    """Let the engine convert with torch: twenty times as fast as NumPy for float16. Up to CHUNK elements at a time,
    torch starts no threads."""
    float16, bfloat16 = partial(_mean, 2.0**16), partial(_mean, 2.0**119)
    conversion.register(DType.FLOAT16, conversion.Conversion(_copy, _copy, _pieces, _pieces, _add, float16))
    conversion.register(DType.BFLOAT16, conversion.Conversion(_copy, _copy, _bfloat16_pieces, _pieces, _add, bfloat16))


def _copy(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source)


def _add(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(first, second, out=out)


def _mean(limit: float, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> bool:
    """torch interpolates in float32: second - (second - first) / 2, rounded once to 16 bits.

    The result has the same bits as half of the sum: float32 has more than twice the digits, so the rounding of the
    difference is lost in the rounding to 16 bits. The two can differ only where a difference or a sum is not finite.
    That cannot be if ``second`` is finite, and so far below the largest float32 that adding any ``first`` is safe.
    """
    low, high = torch.aminmax(second)
    if not (-limit < low.item() and high.item() < limit):
        return False
    torch.lerp(first, second, 0.5, out=out)
    return True


def _pieces(array: Array) -> Pieces:
    return _split(array, None)


def _bfloat16_pieces(array: Array) -> Pieces:
    return _split(array.view(np.int16), torch.bfloat16)


def _split(array: Array, dtype: torch.dtype | None) -> Pieces:
    """Normal tensors, even in a caller's inference mode: temporaries are kept, and written to after that mode."""
    if not array.size:
        return ()
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _split(array, dtype)
    whole = torch.from_numpy(_writable(array))
    return (whole if dtype is None else whole.view(dtype)).unsafe_split(conversion.CHUNK)


def _writable(array: Array) -> Array:
    """``array``, or a copy if it is read-only, because torch has no read-only tensors."""
    return array if array.flags.writeable else array.copy()
