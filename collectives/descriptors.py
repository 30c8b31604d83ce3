"""File descriptors: how to recognise and report that a process has none left, and the limit for strangers."""

from __future__ import annotations

import errno
import os
import resource
import sys
from types import TracebackType
from typing import TypeVar

from collectives.api import HorovodInternalError

__all__ = ["EXHAUSTED", "Reserve", "are_exhausted", "explained", "share_of_strangers"]

Error = TypeVar("Error", bound=BaseException)

EXHAUSTED = "this process has no file descriptor left; raise the limit of ulimit -n"
SPARE_DESCRIPTORS = 16
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def are_exhausted(error: OSError) -> bool:
    """Whether ``error`` means that this process, or this host, has no file descriptor left."""
    return error.errno in NO_DESCRIPTORS


def explained(error: Error, rank: int) -> Error | HorovodInternalError:
    """``error`` of ``rank``, or the error that names the remedy where a lack of descriptors led to it."""
    text = str(error)
    if not _is_lack(error) or (isinstance(error, HorovodInternalError) and text.startswith("rank ")):
        return error
    reason = text if "ulimit -n" in text else f"{EXHAUSTED} ({text})"
    return HorovodInternalError(f"rank {rank} cannot connect: {reason}")


def _is_lack(error: BaseException | None) -> bool:
    """Whether no descriptor was left for ``error`` or one of its causes. Some libraries say so in their text only."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error can be among its own causes
        if (isinstance(error, OSError) and are_exhausted(error)) or "Too many open files" in str(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class Reserve:
    """``count`` descriptors for later, when they may be scarce. A context manager; its end releases them.

    Raises OSError where there are not so many.
    """

    def __init__(self, count: int) -> None:
        self._held: list[int] = []
        try:
            for _ in range(count):
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let others have the descriptors. Idempotent."""
        while self._held:
            os.close(self._held.pop())

    def __enter__(self) -> Reserve:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def share_of_strangers(reserved: int, least: int, most: int) -> int:
    """The number of unauthenticated connections that a listener may hold at once, from ``least`` to ``most``.

    The number is a quarter of the descriptors that are free now, after ``reserved`` ones and a few more are set aside:
    a process has more than one listener.
    """
    return max(least, min(most, (_free() - reserved - SPARE_DESCRIPTORS) // 4))


def _free() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (sys.maxsize if soft == resource.RLIM_INFINITY else soft) - len(os.listdir("/proc/self/fd"))
