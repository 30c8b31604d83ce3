"""Notices the death of a process on this host before the kernel has torn down its memory.

The sockets of a killed process close after its memory is gone, which takes 30 to 70 ms with a framework in it. Earlier,
when one of its threads ends, the kernel walks the *robust list* of this thread (get_robust_list(2)): it marks each word
there that has the number of the thread, and wakes a thread that sleeps on the word.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from collectives.backends.shm import barrier

WORD = 4
# The bits of a word, see futex(2); the others are the number of the thread.
WAITERS, DIED = 0x80000000, 0x40000000
LEFT = WAITERS
SLEEP_SECONDS = 3600.0
# After a death the group is about to end, and the next one may come while a thread is awake, which misses its wake.
AGAIN_SECONDS = 0.05
CLOSE_SECONDS = 2.0
RETRY_SECONDS = 0.005

_NUMBERS = {"x86_64": 273, "aarch64": 99, "ppc64le": 300, "s390x": 304, "riscv64": 99}
_NUMBER = _NUMBERS.get(platform.machine())


class _Head(ctypes.Structure):
    """The head of a robust list. The entries are pointers to the next one; the last one points to the head."""

    _fields_ = (("first", ctypes.c_void_p), ("offset", ctypes.c_long), ("pending", ctypes.c_void_p))


_set_robust_list = ctypes.PyDLL(None).syscall
_set_robust_list.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t)


def deaths_bytes(size: int) -> int:
    """Bytes of shared memory that the watches of ``size`` members need."""
    return size * WORD


class DeathWatch:
    """The end of one member; ``memory`` (zeroed, deaths_bytes(size) bytes) is shared by all of them.

    Each member has a word: 0 before it watches, then the number of a thread, LEFT after :meth:`close`. ``on_death`` is
    called with the position of each member whose process ended before, on the thread of the watch.

    The kernel wakes one thread for each death. So each member sleeps on the word of the next one that may still die,
    and a woken one wakes all others. Where the kernel has no robust lists, no death is noticed.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], position: int, on_death: Callable[[int], None]) -> None:
        self._words = memoryview(memory.data).cast("I")
        start = int(memory.__array_interface__["data"][0])
        self._addresses = [start + index * WORD for index in range(len(self._words))]
        size = len(self._words)
        self._mine = position
        self._following = [(position + step) % size for step in range(1, size)]
        self._bed = self._addresses[position]
        self._on_death = on_death
        self._found: set[int] = set()
        self._closed = False
        # Owned by the watch; sleeps on the word of the next member, ended and joined by close().
        self._thread = threading.Thread(target=self._run, name="hvd-deaths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave: the others will not take the end of this process for a death. Idempotent."""
        self._closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            barrier.wake(self._bed)  # again, because the thread may just be falling asleep
            self._thread.join(RETRY_SECONDS)
        if not self._thread.is_alive():
            self._words.release()

    def _run(self) -> None:
        with _robust(self._addresses[self._mine]) as number:
            self._put(number)
            try:
                while not self._closed:
                    words = self._words.tolist()
                    self._look(words)
                    self._sleep(words)
            finally:
                self._put(LEFT)

    def _put(self, word: int) -> None:
        self._words[self._mine] = word
        barrier.wake(self._addresses[self._mine])

    def _sleep(self, words: Sequence[int]) -> None:
        """Until the next member that may die changes its word, or another one has noticed a death."""
        living = (each for each in self._following if words[each] != LEFT and not words[each] & DIED)
        position = next(living, self._mine)
        self._bed = self._addresses[position]
        if not self._closed:
            barrier.wait(self._bed, words[position], AGAIN_SECONDS if self._found else SLEEP_SECONDS)

    def _look(self, words: Sequence[int]) -> None:
        dead = {position for position, word in enumerate(words) if word & DIED} - self._found
        if not dead:
            return
        self._found |= dead
        for address in self._addresses:
            barrier.wake(address)
        for position in sorted(dead):
            self._on_death(position)


@contextmanager
def _robust(address: int) -> Iterator[int]:
    """The value of the word at ``address`` for which the kernel marks it when this thread ends; 0 if it never does.

    The thread must hold no robust mutex of the C library, whose list this replaces.
    """
    entry = ctypes.c_void_p()
    head = _Head(ctypes.addressof(entry), address - ctypes.addressof(entry), None)
    entry.value = ctypes.addressof(head)
    failed = _NUMBER is None or _set_robust_list(_NUMBER, ctypes.byref(head), ctypes.sizeof(head))
    try:
        yield 0 if failed else WAITERS | threading.get_native_id()
    finally:
        if not failed:
            _set_robust_list(_NUMBER, None, ctypes.sizeof(head))
