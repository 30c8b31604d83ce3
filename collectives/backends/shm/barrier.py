"""A barrier in shared memory: one word per rank, each on its own cache line; spin briefly, then sleep.

Where ranks share cores, two things decide how long a crossing takes. First, a spinning rank may occupy the core of the
rank that it waits for. Yielding does not help: a scheduler that owes the spinning rank time gives it the core again. So
a rank sleeps early, or moves to a core with fewer ranks, when a rank that has not arrived was last seen on the same
core. Second, each needless wake-up costs two context switches. So a sleeping rank is not woken for every rank that
arrives; the last rank wakes all.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import CollectiveTimeoutError, DType
from collectives.backends.base import Call, Group, OnMissing, OnWait, ignore_waits
from collectives.backends.phases import phase
from collectives.backends.placement import Placement
from collectives.backends.placement import current_core as _core

_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), 202)
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ARGUMENTS = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_sleeping = ctypes.CDLL(None).syscall  # releases the GIL
_sleeping.argtypes = _ARGUMENTS
_waking = ctypes.PyDLL(None).syscall  # keeps the GIL: the call is over in a microsecond
_waking.argtypes = _ARGUMENTS


def wait(address: int, value: int, timeout: float) -> None:
    """Sleep while the word at ``address`` is ``value``, until woken, at most ``timeout`` seconds; may wake early."""
    limit = _Timespec(int(timeout), int(timeout % 1.0 * 1e9))
    _sleeping(_NUMBER, address, _WAIT, value, ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``."""
    _waking(_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)


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
LOOKS = 100
CROWDED_LOOKS = 20
"""The number of spins between two checks for another rank on this core."""


def barrier_bytes(size: int) -> int:
    """Bytes of shared memory that a barrier for ``size`` ranks needs: a cache line each, one to wake by, and flags."""
    return (size + 1) * LINE + (size + LINE - 1) // LINE * LINE


class BarrierDisagreement(Exception):
    """Not all ranks arrived with the same value."""


class ShmBarrier:
    """One rank's end of a barrier among the ranks of ``group``, over ``memory`` (zeroed, barrier_bytes(size) bytes).

    A crossing has two halves, so that work fits between them: :meth:`arrive` announces this rank, :meth:`wait` returns
    when all ranks have arrived. Then every rank sees what the others wrote before they arrived: the stores of x86-64
    stay in order, and :meth:`arrive` takes a lock as a fence. The low half of a rank's word is the number of the
    crossing, the high half the value that the rank arrived with. The next word is the core that the rank ran on, the
    one after it the value of :meth:`show`. Sleeping ranks sleep on the *wake word*. ``crowded``: the host has more
    ranks than cores. ``on_wait`` is called while a crossing takes long, unless it was announced by :meth:`ask`.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], group: Group, timeout: float, crowded: bool) -> None:
        rank, size = group.position, group.size
        self._group = group
        self._rank = rank
        self._timeout = timeout
        self._epoch = 0
        self._value = 0
        self._question: tuple[OnMissing, Call] | None = None
        self._error: Exception | None = None
        self._late = self._inside = 0.0
        self._is_first = True
        self.on_wait: OnWait = ignore_waits
        self._words = memoryview(memory.data).cast("Q")
        self._wake_word = size * LINE // WORD
        self._wake_address = int(memory.__array_interface__["data"][0]) + size * LINE
        self._flags = memoryview(memory.data)[(size + 1) * LINE : (size + 1) * LINE + size]
        self._awake = bytes(size)
        self._peers = [(peer, peer * LINE // WORD) for peer in range(size) if peer != rank]
        self._mine = rank * LINE // WORD
        self._crowded = crowded
        self._spins = CROWDED_SPINS if crowded else SPINS
        self._yield_mask = 0 if crowded else YIELD_MASK
        self._looks = CROWDED_LOOKS if crowded else LOOKS
        self._placement = Placement()
        self._fence = threading.Lock()  # owned by this end and never contended: taken for its memory fence only

    def cross(self) -> None:
        """Return when all ranks have arrived."""
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Announce that this rank has arrived."""
        self._epoch = (self._epoch + 1) & MASK
        self._words[self._mine + 1] = _core() & MASK
        with self._fence:
            self._words[self._mine] = self._value << BITS | self._epoch
        with self._fence:
            self._value = 0
            asleep = self._flags.tobytes() != self._awake
        if asleep and (self._all_arrived() or self._is_differing()):
            self._wake_all()

    def _wake_all(self) -> None:
        """Wake the sleeping ranks. Two ranks at once may write the same number; it is still a new one."""
        self._words[self._wake_word] = (self._words[self._wake_word] + 1) & MASK
        wake(self._wake_address)

    @phase("wait for ranks")
    def wait(self) -> None:
        """Return when all ranks have arrived; raises CollectiveTimeoutError, or the error of :meth:`abort`."""
        question, self._question = self._question, None
        begin = monotonic()
        if question is None:
            self._wait()
        else:
            self._agree(question[0])
        if self._is_first:
            self._is_first = False
            self._late += monotonic() - begin
        else:
            self._inside += monotonic() - begin
        self.check()
        if question is not None:
            question[1]()

    def waited(self) -> tuple[float, float]:
        late, inside = self._late, self._inside
        self._late = self._inside = 0.0
        self._is_first = True
        return late, inside

    def show(self, value: int) -> None:
        """Let the other ranks see ``value`` (64 bits) from the next arrival of this rank on."""
        self._words[self._mine + 2] = value

    def all_show(self, value: int) -> bool:
        """Whether all showed ``value`` when they arrived; after a crossing, before the next arrival of this rank."""
        return all([self._words[index + 2] == value for _, index in self._peers])

    def check(self) -> None:
        """Raise the error of :meth:`abort`, if there is one."""
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        over = self._arrive_soon() or self._arrive_late()
        absent = [] if over else self._absent()
        if absent:
            raise CollectiveTimeoutError(
                f"{self._group.describe(absent)} did not enter the operation within {self._timeout:g} s",
                self._group.ranks_at(absent),
            )

    def _arrive_late(self) -> bool:
        """Whether all arrive in time while this rank sleeps."""
        deadline = monotonic() + self._timeout
        while (left := deadline - monotonic()) > 0:
            if self._sleep(min(left, SLEEP_SECONDS), self._all_arrived):
                return True
            self.on_wait()
        return False

    def ask(self, value: int, waiting: OnMissing, agreed: Call) -> None:
        """Arrive at the next crossing with ``value``; the wait raises BarrierDisagreement for another value of a rank.

        It raises at once, without waiting for the other ranks. A rank with another value must not arrive again before
        all ranks know of the disagreement. While it waits it calls ``waiting`` every few milliseconds with the ranks
        that have not arrived. When all have arrived with ``value`` it calls ``agreed``.
        """
        self._value, self._question = value, (waiting, agreed)
        self._is_first = True

    @property
    def is_asking(self) -> bool:
        """Whether the crossing that :meth:`ask` announced has not happened yet."""
        return self._question is not None

    def _agree(self, waiting: OnMissing) -> None:
        if not self._arrive_soon():
            while not self._sleep(SLICE_SECONDS, lambda: self._all_arrived() or self._is_differing()):
                waiting(self._absent())
        if self._is_differing():
            raise BarrierDisagreement

    def _is_differing(self) -> bool:
        """Whether a rank arrived with another value. A rank at a later crossing had arrived here with the same."""
        mine = self._words[self._mine]
        for _, index in self._peers:
            change = self._words[index] ^ mine  # read once: it may change at any time
            if change and not change & MASK:
                return True
        return False

    def _all_arrived(self) -> bool:
        return not self._absent()

    def _absent(self) -> list[int]:
        return [peer for peer, index in self._peers if (self._words[index] - self._epoch) & MASK >= HALF]

    def _arrive_soon(self) -> bool:
        """Whether all arrive while this rank spins. The loop is :meth:`_absent` without the cost of the call."""
        epoch, words, mask, spins, looks = self._epoch, self._words, self._yield_mask, self._spins, self._looks
        for _, index in self._peers:
            while (words[index] - epoch) & MASK >= HALF:
                spins -= 1
                if spins & mask == 0:
                    os.sched_yield()  # the peer may be queued on this core
                if not spins or (spins % looks == 0 and self._gives_way()):
                    return False
        return True

    def _gives_way(self) -> bool:
        """Whether to sleep, because a rank that has not arrived was last seen on this core and this one stays there."""
        here = _core()
        cores = {peer: self._words[index + 1] for peer, index in self._peers}
        if not any([cores[peer] == here for peer in self._absent()]):
            return False
        return not self._placement.improve(here, list(cores.values()), self._epoch) and self._crowded

    def _sleep(self, timeout: float, is_over: Callable[[], bool]) -> bool:
        """Whether ``is_over`` becomes true within ``timeout`` seconds; also True when the barrier is aborted."""
        deadline = monotonic() + timeout
        self._flags[self._rank] = 1
        try:
            while self._error is None:
                seen = self._words[self._wake_word]
                with self._fence:
                    pass  # a rank that arrives now and misses the flag is seen by the check below
                if is_over():
                    return True
                left = deadline - monotonic()
                if left <= 0:
                    return False
                wait(self._wake_address, seen, min(left, SLEEP_SECONDS))
            return True
        finally:
            self._flags[self._rank] = 0

    def abort(self, error: Exception) -> None:
        """Make the current wait and all later ones raise ``error``; callable from any thread."""
        self._error = self._error or error
        wake(self._wake_address)

    def close(self) -> None:
        """Release the memory, and the error, because its traceback may hold views of the memory."""
        self._error = None
        self._words.release()
        self._flags.release()


BUFFER_BYTES = 1 << 20
BUFFERS = 3
HEADER_BYTES = 8

Array = npt.NDArray[Any]


def buffers_bytes(size: int) -> int:
    """Bytes of shared memory for the buffers of ``size`` ranks."""
    return BUFFERS * size * BUFFER_BYTES


class ShmBuffers:
    """Each of ``size`` ranks has BUFFERS buffers in ``memory`` (buffers_bytes(size) bytes, page-aligned).

    All ranks call :meth:`next` in the same order, once a round. A rank may fill the buffers of two rounds without a
    crossing: ranks that have not arrived at the barrier may still use the last buffers, but no others. So the next
    operation starts on the next buffers at once. ``turn`` may be set back while no rank has crossed the barrier since.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], size: int) -> None:
        ring = memory.reshape(BUFFERS, size, BUFFER_BYTES)
        rows = [[ring[turn, member] for member in range(size)] for turn in range(BUFFERS)]
        self._rows = rows
        self._typed: dict[str, list[list[Array]]] = {}
        self._headers: list[list[memoryview]] = []
        self.turn = 0

    def next(self, dtype: DType) -> list[Array]:
        """The buffer of each member for the next round, as elements of ``dtype.storage``."""
        self.turn = (self.turn + 1) % BUFFERS
        try:
            return self._typed[dtype.label][self.turn]
        except KeyError:  # views of all dtypes would make up most of the time in which the backend connects
            views = [[buffer.view(dtype.storage) for buffer in row] for row in self._rows]
            return self._typed.setdefault(dtype.label, views)[self.turn]

    def headers(self) -> list[memoryview]:
        """The first 8 bytes of the buffer of each member for this round, as an integer with a sign."""
        if not self._headers:
            self._headers = [[memoryview(buffer.data)[:HEADER_BYTES].cast("q") for buffer in row] for row in self._rows]
        return self._headers[self.turn]

    def close(self) -> None:
        """Release the views of the memory."""
        self._rows.clear()
        self._typed.clear()
        self._headers.clear()
