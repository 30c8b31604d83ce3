"""The memory that a rank shares with its helper process."""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["SharedMemory"]


class SharedMemory:
    """A file in memory, which each side maps again after it has grown. ``descriptor`` is owned by this object."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedMemory:
        """New memory, without a name: nothing is left when both sides have ended."""
        return cls(os.memfd_create("hvd-pygloo", os.MFD_CLOEXEC))

    def grow(self, nbytes: int) -> mmap.mmap:
        """The memory, with at least ``nbytes``; more than before on request of the rank only."""
        if nbytes > self._size():
            os.ftruncate(self.descriptor, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if self._map is None or len(self._map) < nbytes:
            self._map = mmap.mmap(self.descriptor, self._size())
        return self._map

    def address(self, offset: int, nbytes: int) -> int:
        """The address of the byte at ``offset``, in the process of the caller; ``nbytes`` follow."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.grow(offset + nbytes), offset))

    def close(self) -> None:
        """Give back the descriptor; the memory goes with its last view."""
        os.close(self.descriptor)
        self._map = None

    def _size(self) -> int:
        return os.fstat(self.descriptor).st_size
