"""The interface to the memory of one kind of device: the few operations besides collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives import buffers
from collectives.api import DType, override
from collectives.backends.completion import DONE, Completion
from collectives.buffers import Buffer
from collectives.kernels.reduction import narrow, scale_array, widen


class Floats(NamedTuple):
    """An operand: ``factor`` times the floats in ``planes``.

    ``planes`` is one flat buffer of floats, or two of 16-bit integers, which hold the upper and the lower halves of
    float32. 16-bit floats are computed in float32.
    """

    planes: tuple[Buffer, ...]
    factor: float = 1.0


class Memory(ABC):
    """Allocates, fills, scales and combines memory on a device.

    A call takes effect after the earlier calls and after the earlier operations of the backend that this memory belongs
    to, and before the later ones. It may return before; :meth:`fence` is done when it is over. A buffer of
    :meth:`empty` may be dropped as soon as the last call that uses it has returned. Calls come from the thread that
    runs the operations.
    """

    device: ClassVar[str]

    @abstractmethod
    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """A new buffer with any content."""

    @abstractmethod
    def fill(self, target: Buffer, value: float) -> None:
        """Set all elements to ``value``, a number of the buffer's dtype."""

    @abstractmethod
    def scale(self, source: Buffer, target: Buffer, factor: float) -> None:
        """target = factor * source; both have one dtype and length. They may be the same memory."""

    @abstractmethod
    def combine(self, target: Floats, first: Floats, second: Floats) -> None:
        """target = first + second, rounded once; ``target`` has no factor. Its planes may be planes of the others."""

    @abstractmethod
    def products(self, first: Floats, second: Floats) -> tuple[float, float, float]:
        """The dot products first.second, first.first and second.second, in float64. Waits for them."""

    @abstractmethod
    def store(self, numbers: Sequence[float]) -> Buffer:
        """A new buffer of ``numbers`` in float64."""

    @abstractmethod
    def load(self, source: Buffer) -> list[float]:
        """The numbers in a buffer of float64. Waits for them."""

    @abstractmethod
    def fence(self) -> Completion:
        """A completion that is done when all calls so far are over."""

    def copy(self, source: Buffer, target: Buffer) -> None:
        """target = source; both have one dtype and length."""
        self.scale(source, target, 1.0)


CHUNK = 1 << 16
"""Number of elements to compute at once, so that the temporaries stay in the cache."""

Array = npt.NDArray[Any]

_HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})


class HostMemory(Memory):
    """A :class:`Memory`."""

    device = "cpu"

    @override
    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        return buffers.empty(dtype, shape)

    @override
    def fill(self, target: Buffer, value: float) -> None:
        if target.dtype is DType.BFLOAT16:
            target.host[:] = np.float32(value).view(np.uint32) >> 16
        else:
            target.host[:] = value

    @override
    def scale(self, source: Buffer, target: Buffer, factor: float) -> None:
        scale_array(source.host, target.host, source.dtype, factor)

    @np.errstate(all="ignore")
    @override
    def combine(self, target: Floats, first: Floats, second: Floats) -> None:
        for start, stop in _chunks(target.planes[0].count):
            one, other = (np.multiply(_read(each, start, stop), each.factor) for each in (first, second))
            _write(target, start, stop, np.add(one, other, out=one))

    @np.errstate(all="ignore")
    @override
    def products(self, first: Floats, second: Floats) -> tuple[float, float, float]:
        totals = np.zeros(3)
        for start, stop in _chunks(first.planes[0].count):
            one, other = (_read(each, start, stop).astype(np.float64) for each in (first, second))
            totals += (one @ other, one @ one, other @ other)
        crossed, ones, others = totals.tolist()
        return crossed * first.factor * second.factor, ones * first.factor**2, others * second.factor**2

    @override
    def store(self, numbers: Sequence[float]) -> Buffer:
        return buffers.as_buffer(np.array(numbers, np.float64))

    @override
    def load(self, source: Buffer) -> list[float]:
        numbers: list[float] = source.host.tolist()
        return numbers

    @override
    def fence(self) -> Completion:
        return DONE


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, CHUNK):
        yield start, min(start + CHUNK, count)


def _read(operand: Floats, start: int, stop: int) -> Array:
    """The numbers without their factor, not to be written to."""
    if len(operand.planes) == 2:
        upper, lower = (plane.host[start:stop].view(np.uint16) for plane in operand.planes)
        bits = upper.astype(np.uint32)
        bits <<= 16
        bits |= lower
        return bits.view(np.float32)
    [plane] = operand.planes
    numbers = plane.host[start:stop]
    return widen(numbers, plane.dtype) if plane.dtype in _HALVES else numbers


def _write(target: Floats, start: int, stop: int, values: Array) -> None:
    if len(target.planes) == 2:
        upper, lower = (plane.host[start:stop].view(np.uint16) for plane in target.planes)
        bits = values.view(np.uint32)
        upper[:] = bits >> 16
        lower[:] = bits.astype(np.uint16)
        return
    [plane] = target.planes
    if plane.dtype in _HALVES:
        narrow(values, plane.host[start:stop], plane.dtype)
    else:
        plane.host[start:stop] = values
