"""A barrier in shared memory: one word per rank, each on its own cache line; spin briefly, then sleep."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.api import CollectiveTimeoutError
from collectives.backends.shm import futex

__all__ = ["LINE", "Disagreement", "Gate", "gate_bytes"]

LINE = 64
WORD = 8
BITS = 32
MASK = 0xFFFFFFFF
HALF = 0x80000000
SLEEP_SECONDS = 0.05
SLICE_SECONDS = 0.005
SPINS = 400
YIELD_MASK = 15


def gate_bytes(size: int) -> int:
    """Bytes of shared memory that a gate for ``size`` ranks needs: a line per word, and the sleepers' flags."""
    return size * LINE + (size + LINE - 1) // LINE * LINE


class Disagreement(Exception):
    """Not all ranks came with the same value."""


class _Question(NamedTuple):
    """What :meth:`Gate.ask` was given to call."""

    waiting: Callable[[list[int]], None]
    agreed: Callable[[], None]


class Gate:
    """Rank ``rank``'s end of a barrier among ``size`` ranks, over ``memory`` (zeroed, gate_bytes(size) bytes).

    A crossing has two halves, so that work fits between them: :meth:`arrive` says that this rank has come,
    :meth:`wait` returns when all have. What a rank wrote before it arrived is visible to all who waited: the stores of
    x86-64 stay in order, and :meth:`arrive` fences by taking a lock. A word is the number of the crossing, and above it
    the value that the rank came with.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int, size: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._epoch = 0
        self._value = 0
        self._question: _Question | None = None
        self._error: Exception | None = None
        self._address = int(memory.__array_interface__["data"][0])
        self._words = memoryview(memory.data).cast("Q")
        self._flags = memoryview(memory.data)[size * LINE : size * LINE + size]
        self._awake = bytes(size)
        self._peers = [(peer, peer * LINE // WORD) for peer in range(size) if peer != rank]
        self._mine = rank * LINE // WORD
        crowded = size > len(os.sched_getaffinity(0))
        self._spins = SPINS // 2 if crowded else SPINS
        self._yield_mask = 0 if crowded else YIELD_MASK
        self._fence = threading.Lock()  # owned by this end and never contended: taken for its memory fence only

    def cross(self) -> None:
        """Return when all ranks have come."""
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Say that this rank has come."""
        self._epoch = (self._epoch + 1) & MASK
        with self._fence:
            self._words[self._mine] = self._value << BITS | self._epoch
        with self._fence:
            self._value = 0
            asleep = self._flags.tobytes() != self._awake
        if asleep:
            futex.wake(self._address + self._rank * LINE)

    def wait(self) -> None:
        """Return when all have come; raises CollectiveTimeoutError, or what :meth:`abort` was given."""
        question, self._question = self._question, None
        if question is None:
            self._wait()
        else:
            self._agree(question.waiting)
        if self._error is not None:
            raise self._error
        if question is not None:
            question.agreed()

    def _wait(self) -> None:
        for peer, index in self._peers:
            if not (self._is_here(index) or self._sleep(peer, index, self._timeout)):
                raise CollectiveTimeoutError(
                    f"member {peer} of the shared-memory group did not come within {self._timeout:g} s; it is "
                    "stuck or slow. Look at that rank, or raise HOROVOD_GLOO_TIMEOUT_SECONDS"
                )

    def ask(self, value: int, waiting: Callable[[list[int]], None], agreed: Callable[[], None]) -> None:
        """At the next crossing, come with ``value``; the wait raises Disagreement when another rank does not.

        It does so within milliseconds, without waiting for the rest. Meanwhile it calls ``waiting`` every few
        milliseconds, with the ranks that have not come. Once all have come with ``value`` it calls ``agreed``.
        """
        self._value, self._question = value, _Question(waiting, agreed)

    @property
    def is_asking(self) -> bool:
        """Whether the crossing that :meth:`ask` was about is still to come."""
        return self._question is not None

    def _agree(self, waiting: Callable[[list[int]], None]) -> None:
        mine = self._words[self._mine]
        for peer, index in self._peers:
            is_here = self._is_here(index)
            while not is_here:
                if any(self._differs(other, mine) for _, other in self._peers):
                    raise Disagreement
                is_here = self._sleep(peer, index, SLICE_SECONDS)
                if not is_here:
                    waiting([other for other, place in self._peers if not self._has_come(place)])
            if self._differs(index, mine):
                raise Disagreement

    def _differs(self, index: int, mine: int) -> bool:
        """Whether that rank came with another value; one that has gone on, had come with the same."""
        word = self._words[index]
        return word != mine and (word ^ mine) & MASK == 0

    def _has_come(self, index: int) -> bool:
        return (self._words[index] - self._epoch) & MASK < HALF

    def _is_here(self, index: int) -> bool:
        """Whether that rank comes within a moment. Looks as :meth:`_has_come` does, without the cost of the call."""
        epoch, words, mask = self._epoch, self._words, self._yield_mask
        for spin in range(self._spins):
            if (words[index] - epoch) & MASK < HALF:
                return True
            if spin & mask == mask:
                os.sched_yield()  # the peer may be queued on this very core
        return False

    def _sleep(self, peer: int, index: int, timeout: float) -> bool:
        """Whether that rank comes within ``timeout`` seconds; True, too, when the gate is aborted."""
        deadline = time.monotonic() + timeout
        self._flags[self._rank] = 1
        try:
            while self._error is None:
                seen = self._words[index]
                if self._has_come(index):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                futex.wait(self._address + peer * LINE, seen & MASK, min(left, SLEEP_SECONDS))
            return True
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
