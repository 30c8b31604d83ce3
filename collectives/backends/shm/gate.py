"""A barrier in shared memory: one word per rank, each on its own cache line; spin briefly, then sleep.

Where ranks share cores, two things decide how long a crossing takes. Who spins may keep from its core the very rank
that it waits for: a scheduler that owes it time gives it the core again, whatever it yields. So it sleeps early when a
rank that is still to come was last seen on this core. And who is woken for each rank that comes, only to wait for the
next, costs a core two switches each time. So one wake-up is enough: the last rank rings for all.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.api import CollectiveTimeoutError
from collectives.backends.group import Group
from collectives.backends.shm import futex
from collectives.cores import Cores

__all__ = ["LINE", "Disagreement", "Gate", "gate_bytes"]

LINE = 64
WORD = 8
BITS = 32
MASK = 0xFFFFFFFF
HALF = 0x80000000
SLEEP_SECONDS = 0.05
SLICE_SECONDS = 0.005
SPINS = 400
CROWDED_SPINS = 200
YIELD_MASK = 15
LOOKS = 20
"""Where ranks share cores: so many spins between two looks at who else is on this one."""

_core = ctypes.PyDLL(None).sched_getcpu  # sched_getcpu(3); -1, where the system cannot tell, is nobody's core


def gate_bytes(size: int) -> int:
    """Bytes of shared memory that a gate for ``size`` ranks needs: a line each, one for the bell, and flags."""
    return (size + 1) * LINE + (size + LINE - 1) // LINE * LINE


class Disagreement(Exception):
    """Not all ranks came with the same value."""


class _Question(NamedTuple):
    """What :meth:`Gate.ask` was given to call."""

    waiting: Callable[[list[int]], None]
    agreed: Callable[[], None]


class Gate:
    """One rank's end of a barrier among the ranks of ``group``, over ``memory`` (zeroed, gate_bytes(size) bytes).

    A crossing has two halves, so that work fits between them: :meth:`arrive` says that this rank has come,
    :meth:`wait` returns when all have. What a rank wrote before it arrived is visible to all who waited: the stores of
    x86-64 stay in order, and :meth:`arrive` fences by taking a lock. A word is the number of the crossing, and above it
    the value that the rank came with; the word after it is the core that the rank was on, where ranks share cores. Who
    sleeps, sleeps on the *bell*.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], group: Group, timeout: float) -> None:
        rank, size = group.position, group.size
        self._group = group
        self._rank = rank
        self._timeout = timeout
        self._epoch = 0
        self._value = 0
        self._question: _Question | None = None
        self._error: Exception | None = None
        self._words = memoryview(memory.data).cast("Q")
        self._bell = size * LINE // WORD
        self._bell_address = int(memory.__array_interface__["data"][0]) + size * LINE
        self._flags = memoryview(memory.data)[(size + 1) * LINE : (size + 1) * LINE + size]
        self._awake = bytes(size)
        self._peers = [(peer, peer * LINE // WORD) for peer in range(size) if peer != rank]
        self._mine = rank * LINE // WORD
        self._crowded = Cores(len(os.sched_getaffinity(0)), size).are_crowded
        self._spins = CROWDED_SPINS if self._crowded else SPINS
        self._yield_mask = 0 if self._crowded else YIELD_MASK
        self._fence = threading.Lock()  # owned by this end and never contended: taken for its memory fence only

    def cross(self) -> None:
        """Return when all ranks have come."""
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Say that this rank has come."""
        self._epoch = (self._epoch + 1) & MASK
        if self._crowded:
            self._words[self._mine + 1] = _core() & MASK
        with self._fence:
            self._words[self._mine] = self._value << BITS | self._epoch
        with self._fence:
            self._value = 0
            asleep = self._flags.tobytes() != self._awake
        if asleep and (self._are_here() or self._is_differing()):
            self._ring()

    def _ring(self) -> None:
        """Wake the sleepers. Of two ranks that ring at once both may write the same number: it is a new one, still."""
        self._words[self._bell] = (self._words[self._bell] + 1) & MASK
        futex.wake(self._bell_address)

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
        over = self._come_soon() or self._sleep(self._timeout, self._are_here)
        absent = [] if over else self._absent()
        if absent:
            raise CollectiveTimeoutError(
                f"{self._group.describe(absent)} did not come to the operation within {self._timeout:g} s: stuck or "
                "slow. Look there, or raise HOROVOD_GLOO_TIMEOUT_SECONDS"
            )

    def ask(self, value: int, waiting: Callable[[list[int]], None], agreed: Callable[[], None]) -> None:
        """At the next crossing, come with ``value``; the wait raises Disagreement when another rank does not.

        It does so at once, without waiting for the rest; a rank with another value must not come again until all have
        heard of it. Meanwhile it calls ``waiting`` every few milliseconds, with the ranks that have not come. Once all
        have come with ``value`` it calls ``agreed``.
        """
        self._value, self._question = value, _Question(waiting, agreed)

    @property
    def is_asking(self) -> bool:
        """Whether the crossing that :meth:`ask` was about is still to come."""
        return self._question is not None

    def _agree(self, waiting: Callable[[list[int]], None]) -> None:
        if not self._come_soon():
            while not self._sleep(SLICE_SECONDS, lambda: self._are_here() or self._is_differing()):
                waiting(self._absent())
        if self._is_differing():
            raise Disagreement

    def _is_differing(self) -> bool:
        """Whether a rank came with another value; one that has gone on, had come with the same."""
        mine = self._words[self._mine]
        changes = (self._words[index] ^ mine for _, index in self._peers)  # each is read once: it may go on any time
        return any(change and not change & MASK for change in changes)

    def _are_here(self) -> bool:
        return not self._absent()

    def _absent(self) -> list[int]:
        return [peer for peer, index in self._peers if (self._words[index] - self._epoch) & MASK >= HALF]

    def _come_soon(self) -> bool:
        """Whether all come within a moment. Looks as :meth:`_absent` does, without the cost of the call."""
        epoch, words, mask, spins = self._epoch, self._words, self._yield_mask, self._spins
        for _, index in self._peers:
            while (words[index] - epoch) & MASK >= HALF:
                spins -= 1
                if spins & mask == 0:
                    os.sched_yield()  # the peer may be queued on this very core
                if not spins or (self._crowded and spins % LOOKS == 0 and self._is_in_the_way()):
                    return False
        return True

    def _is_in_the_way(self) -> bool:
        """Whether a rank that is still to come was on this core when it was seen last."""
        here = _core()
        return any(self._words[peer * LINE // WORD + 1] == here for peer in self._absent())

    def _sleep(self, timeout: float, is_over: Callable[[], bool]) -> bool:
        """Whether it ``is_over`` within ``timeout`` seconds; True, too, when the gate is aborted."""
        deadline = time.monotonic() + timeout
        self._flags[self._rank] = 1
        try:
            while self._error is None:
                seen = self._words[self._bell]
                with self._fence:
                    pass  # the look below sees a rank that comes and does not see the flag
                if is_over():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                futex.wait(self._bell_address, seen, min(left, SLEEP_SECONDS))
            return True
        finally:
            self._flags[self._rank] = 0

    def abort(self, error: Exception) -> None:
        """Make present and future waits of this end raise ``error``; from any thread."""
        self._error = self._error or error
        futex.wake(self._bell_address)

    def close(self) -> None:
        """Let go of the memory, and of the error, whose traceback may hold some of it."""
        self._error = None
        self._words.release()
        self._flags.release()
