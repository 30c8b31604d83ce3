"""The interface to the memory of one kind of device: the few operations besides collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from collectives.api import DType
from collectives.buffers import Buffer
from collectives.completion import Completion

__all__ = ["Floats", "Memory"]


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
