"""Memory that is used again: that of large results, once no array views it, and that of the temporary arrays of a step.
And memory that a process leaves to the kernel at its end.

The kernel hands out new memory page by page, and clears each page first. For a result of 64 MB that takes longer than
the collective itself. So a returned block is kept for the next result of its size, and new blocks consist of huge pages
if the kernel has them. An optimizer with temporary arrays spends up to a third of its time on pages that malloc gives
back in each step, so malloc of glibc keeps them.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import io
import mmap
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

MINIMUM = 1 << 18
"""The smallest result, in bytes, that gets a block; smaller ones come from the framework's own allocator."""
KEPT_BYTES = 1 << 28
"""The most bytes of unused blocks that a process keeps."""
KEPT_SECONDS = 5.0
"""Seconds; blocks that stay unused for one to two times this long go back to the kernel."""
FREED_BYTES = 1 << 30
"""The most memory, in bytes, that malloc of a rank keeps at the end of a heap; a few threads share one."""
FREED_SHARE = 16
"""The ranks of a host together keep at most one of so many parts of its memory for that."""
LARGEST_ARRAY = 1 << 27
"""In bytes. Larger arrays have pages of their own, which always go back: as holes in the heap they could not."""
MOST_OF_OLD_MALLOC = 1 << 25
"""In bytes. Earlier versions of glibc refuse a larger threshold for such arrays."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3).
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
HUGE_PAGE = 1 << 21
JOIN_SECONDS = 1.0

Bytes = npt.NDArray[np.uint8]


class _Block:
    """``size`` bytes, private to this process: a forked child has a copy."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.since = 0.0
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE_PAGE:
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._whole = np.frombuffer(memory, np.uint8)
        self.address = int(self._whole.__array_interface__["data"][0])


class _Lease:
    """Only the views of a block keep its lease alive: the lease ends with the last view."""

    __slots__ = ("__array_interface__", "_block", "_give_back")

    def __init__(self, block: _Block, nbytes: int, give_back: Callable[[_Block], None]) -> None:
        self._block = block
        self._give_back = give_back
        self.__array_interface__ = {"data": (block.address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._give_back(self._block)


class ResultMemory:
    """Hands out arrays. Any thread may call it.

    The garbage collector may drop the last view of an array in any thread, at any point of a program. So giving back
    takes no lock: each step on the unused blocks is a single operation on a list or a dict.
    """

    def __init__(self) -> None:
        self._unused: dict[int, list[_Block]] = {}
        self._keeps = False
        self._was_taken = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        # Owned by this object, held to start or end the thread; reentrant, as a signal handler may call shutdown().
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of memory with any content. MemoryError or OSError if there is no memory."""
        size = _rounded(nbytes)
        self._was_taken = True
        if not self._keeps:
            self._begin()
        try:
            block = self._unused[size].pop()
        except (KeyError, IndexError):
            block = _Block(size)
        return np.asarray(_Lease(block, nbytes, self._give_back))

    @property
    def unused_bytes(self) -> int:
        """The bytes that are kept for later results."""
        return sum(size * len(blocks) for size, blocks in self._unused.copy().items())

    def close(self) -> None:
        """Release the unused blocks. Blocks that are freed later are released at once, until memory is taken again."""
        with self._lock:
            self._stop.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(JOIN_SECONDS)
            self._end()

    def forget(self) -> None:
        """Start afresh in a forked child: it lacks the thread, and may lack the thread that owns the lock."""
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._thread = None
        self._end()

    def _begin(self) -> None:
        with self._lock:
            if not self._keeps:
                self._keeps, self._stop = True, threading.Event()
                # Owned by this object; it ends when nothing was taken for KEPT_SECONDS, or by close(), which joins it.
                thread = threading.Thread(target=self._watch, args=(self._stop,), name="hvd-results", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread can start, as at the end of the interpreter: keep nothing
                    self._keeps = False
                else:
                    self._thread = thread

    def _watch(self, stop: threading.Event) -> None:
        while self._was_taken:
            self._was_taken = False
            if stop.wait(KEPT_SECONDS):
                return
            self._let_go_of_the_old(time.monotonic() - KEPT_SECONDS)
        self._end()

    def _end(self) -> None:
        self._keeps = False
        self._unused.clear()

    def _let_go_of_the_old(self, before: float) -> None:
        for blocks in self._unused.copy().values():
            with suppress(IndexError):  # empty, or another thread took the last one
                while blocks[0].since < before:
                    blocks.pop(0)

    def _give_back(self, block: _Block) -> None:
        if not self._keeps or not self._has_room(block.size):
            return
        block.since = time.monotonic()
        self._unused.setdefault(block.size, []).append(block)
        if not self._keeps:
            self._unused.clear()

    def _has_room(self, size: int) -> bool:
        """Whether a block of ``size`` may be kept; blocks of other sizes go first."""
        if self.unused_bytes + size > KEPT_BYTES:
            for other in self._unused.copy():
                if other != size:
                    self._unused.pop(other, None)
        return self.unused_bytes + size <= KEPT_BYTES


def _rounded(nbytes: int) -> int:
    """At most an eighth more, so that results of nearly the same size share blocks."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def usable_bytes(groups: Path = CONTROL_GROUPS) -> int:
    """The memory of the host, or that of the container if it has less, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # ValueError: "max"
            limits.append(int((groups / name).read_text()))
    return min(limits)


def kept_bytes(environment: Mapping[str, str], usable: int, local_size: int) -> int:
    """The freed memory that a heap of a rank may keep, in bytes; 0 where the user has set the thresholds of malloc."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(
        f"glibc.malloc.{name}" in tunables or f"MALLOC_{name.upper()}_" in environment
        for name in ("mmap_threshold", "trim_threshold")
    ):
        return 0
    return min(FREED_BYTES, usable // FREED_SHARE // max(1, local_size))


def keep_freed_memory(environment: Mapping[str, str], local_size: int) -> bool:
    """Set the malloc of this process, for all its threads and for good. False where there is no such malloc."""
    kept = kept_bytes(environment, usable_bytes(), local_size)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if not kept or set_option is None:
        return False
    has_set = [set_option(MMAP_THRESHOLD, min(kept, size)) for size in (MOST_OF_OLD_MALLOC, LARGEST_ARRAY)]
    return any(has_set) and bool(set_option(TRIM_THRESHOLD, kept))


WRITERS = io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper
STREAMS = 0, 1, 2  # which Python writes at its end


def leave_to_kernel() -> None:
    """Let the process end without freeing its objects one by one: TensorFlow makes so many that it would take seconds.

    Files in cycles of references, which only the garbage collector would close, get what is in their buffers.
    """
    for found in gc.get_objects() if has_files() else ():
        if type(found) in WRITERS:
            with suppress(Exception):  # it is closed, or broken; Python ignores that at its end, too
                if takes_more(found.fileno()):
                    found.flush()
    gc.freeze()


def has_files() -> bool:
    """Whether there are files to write to, besides the streams. To look at all objects takes a tenth of a second."""
    return any(_is_written(int(name)) for name in os.listdir("/proc/self/fd") if int(name) not in STREAMS)


def _is_written(descriptor: int) -> bool:
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return is_file and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:  # it is closed meanwhile, such as that of the listing
        return False


def takes_more(descriptor: int) -> bool:
    """Whether a write would not wait: a daemon thread may wait at a full pipe, with the lock of its file."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


results = ResultMemory()
os.register_at_fork(after_in_child=results.forget)
