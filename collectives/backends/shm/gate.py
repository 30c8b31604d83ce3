"""A barrier in shared memory: one epoch word per rank, each on its own cache line; spin briefly, then sleep."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import numpy.typing as npt

from collectives.api import CollectiveTimeoutError
from collectives.backends.shm import futex

__all__ = ["LINE", "Gate", "gate_bytes"]

LINE = 64
MASK = 0xFFFFFFFF
HALF = 0x80000000
SLEEP_SECONDS = 0.05
SPINS = 400
YIELD_MASK = 15


def gate_bytes(size: int) -> int:
    """Bytes of shared memory that a gate for ``size`` ranks needs: a line per epoch, and the sleepers' flags."""
    return size * LINE + (size + LINE - 1) // LINE * LINE


class Gate:
    """Rank ``rank``'s end of a barrier among ``size`` ranks, over ``memory`` (zeroed, gate_bytes(size) bytes).

    A crossing has two halves, so that work fits between them: :meth:`arrive` says that this rank has come,
    :meth:`wait` returns when all have. What a rank wrote before it arrived is visible to all who waited: the stores of
    x86-64 stay in order, and :meth:`arrive` fences by taking a lock.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int, size: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._epoch = 0
        self._error: Exception | None = None
        self._address = int(memory.__array_interface__["data"][0])
        self._words = memoryview(memory.data).cast("I")
        self._flags = memoryview(memory.data)[size * LINE : size * LINE + size]
        self._awake = bytes(size)
        self._peers = [(peer, peer * LINE // 4) for peer in range(size) if peer != rank]
        self._mine = rank * LINE // 4
        self._spins = SPINS if size <= len(os.sched_getaffinity(0)) else SPINS // 20
        self._fence = threading.Lock()  # owned by this end and never contended: taken for its memory fence only

    def cross(self) -> None:
        """Return when all ranks have come."""
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Say that this rank has come."""
        self._epoch = (self._epoch + 1) & MASK
        with self._fence:
            self._words[self._mine] = self._epoch
        with self._fence:
            asleep = self._flags.tobytes() != self._awake
        if asleep:
            futex.wake(self._address + self._rank * LINE)

    def wait(self) -> None:
        """Return when all have come; raises CollectiveTimeoutError, or what :meth:`abort` was given."""
        epoch, words = self._epoch, self._words
        for peer, index in self._peers:
            for spin in range(self._spins):
                if (words[index] - epoch) & MASK < HALF:
                    break
                if spin & YIELD_MASK == YIELD_MASK:
                    os.sched_yield()  # the peer may be queued on this very core
            else:
                self._sleep(peer, index, epoch)
        if self._error is not None:
            raise self._error

    def _sleep(self, peer: int, index: int, epoch: int) -> None:
        deadline = time.monotonic() + self._timeout
        self._flags[self._rank] = 1
        try:
            while self._error is None:
                seen = self._words[index]
                if (seen - epoch) & MASK < HALF:
                    return
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(
                        f"member {peer} of the shared-memory group did not come within {self._timeout:g} s; it is "
                        "stuck or slow. Look at that rank, or raise HOROVOD_GLOO_TIMEOUT_SECONDS"
                    )
                futex.wait(self._address + peer * LINE, seen, SLEEP_SECONDS)
        finally:
            self._flags[self._rank] = 0

    def abort(self, error: Exception) -> None:
        """Make present and future waits of this end raise ``error``; from any thread."""
        self._error = self._error or error
        for peer, _ in self._peers:
            futex.wake(self._address + peer * LINE)

    def close(self) -> None:
        """Let go of the memory, and of the error, whose traceback may hold some of it."""
        self._error = None
        self._words.release()
        self._flags.release()
