"""What the backend needs from a GPU besides collectives: its memory, one stream, and kernels that pack."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from collectives.backends.memory import Memory
from collectives.backends.nccl.recipe import BYTES, Conversion
from collectives.buffers import Buffer
from collectives.completion import Completion

__all__ = ["Device", "Placed"]


class Placed(NamedTuple):
    """``buffer`` is next to others in packed memory, from element ``at`` on."""

    at: int
    buffer: Buffer


class Device(Memory):
    """One GPU, and a ``stream`` of high priority on it, in whose order all calls take effect. No call waits.

    ``stream`` is the handle, a ``cudaStream_t``.
    """

    device = "cuda"
    stream: int

    @abstractmethod
    def current(self) -> AbstractContextManager[object]:
        """In the block, this is the GPU of the calling thread. Calls of NCCL need it; those of this class do not.

        No call in the block disturbs the capture of a CUDA graph by another thread.
        """

    @abstractmethod
    def pack(
        self, pieces: Sequence[Placed], target: Buffer, conversion: Conversion = BYTES, factor: float = 1.0
    ) -> None:
        """Write ``factor`` times the numbers of all ``pieces`` to ``target``, converted, with one kernel."""

    @abstractmethod
    def unpack(
        self, source: Buffer, pieces: Sequence[Placed], conversion: Conversion = BYTES, factor: float = 1.0
    ) -> None:
        """The reverse of :meth:`pack`: read ``source``, convert, divide, scale, and write all ``pieces``."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Buffer:
        """New bytes on the host that the GPU can copy while the host goes on; to be held until it has."""

    @abstractmethod
    def download_to(self, source: Buffer, target: Buffer) -> None:
        """Copy ``source`` to ``target``, memory of :meth:`pinned`."""

    @abstractmethod
    def upload_from(self, source: Buffer, target: Buffer) -> None:
        """Copy ``source``, memory of :meth:`pinned`, to ``target``."""

    def begin_after(self, ready: Completion) -> None:
        """Let all later calls take effect after ``ready``."""
        ready.precede(self.stream)
