"""File descriptors: how many a process may have, how to report that it has none left, and the limit for strangers.

The *soft* limit is the one that counts, often 1,024; a process may raise it up to its *hard* limit. Programs that use
``select()`` fail above 1,024, so a process that runs a program of the user raises it only when it needs more, and
processes that others start from it get the first soft limit back.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeVar

from collectives.api import HorovodInternalError, NoDescriptorError

Error = TypeVar("Error", bound=BaseException)

EXHAUSTED = "this process has no file descriptor left; raise the limit of ulimit -n"
SPARE_DESCRIPTORS = 16
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


_first: list[int] = []
"""The soft limit before this process raised it; of a process, because the limit is."""


def raise_limit() -> bool:
    """Raise the soft limit to the hard one. Whether that has changed it; children that are forked get the first one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the host allows less than the hard limit says
        return False
    if not _first:
        _first.append(soft)
        os.register_at_fork(after_in_child=_restore)
    return True


def first_limit() -> int:
    """The soft limit for the programs of users that this process starts: what it was before this process raised it."""
    return _first[0] if _first else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def is_raised() -> bool:
    """Whether this process has raised its limit."""
    return bool(_first)


def _restore() -> None:
    """Set the first soft limit again, as far as the hard one allows that."""
    if _first:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (_first[0], hard))


@contextmanager
def raised_limit() -> Iterator[None]:
    """Raise the limit for a block. For a process that runs no program of the user."""
    has_changed = raise_limit()
    try:
        yield
    finally:
        if has_changed:
            _restore()


def provide(count: int) -> None:
    """Raise the limit if this process cannot open ``count`` more descriptors."""
    if _free() < count:
        raise_limit()


def make_room_after(descriptor: int) -> None:
    """``descriptor`` was opened: raise the limit if it is beyond the middle."""
    if descriptor > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        raise_limit()


def are_exhausted(error: OSError) -> bool:
    """Whether ``error`` means that this process, or this host, has no file descriptor left."""
    return error.errno in NO_DESCRIPTORS


def explained(error: Error, rank: int) -> Error | HorovodInternalError:
    """``error`` of ``rank``, or the error that names the remedy where a lack of descriptors led to it."""
    text = str(error)
    if not _is_lack(error) or (isinstance(error, HorovodInternalError) and text.startswith("rank ")):
        return error
    reason = text if "ulimit -n" in text else f"{EXHAUSTED} ({text})"
    return NoDescriptorError(f"rank {rank} cannot connect: {reason}")


def _is_lack(error: BaseException | None) -> bool:
    """Whether no descriptor was left for ``error`` or one of its causes. Some libraries say so in their text only.

    The text of an error of another rank, or of the driver, may tell of a process that lacks descriptors there.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error can be among its own causes
        is_foreign = not isinstance(error, HorovodInternalError)
        if isinstance(error, NoDescriptorError) or (isinstance(error, OSError) and are_exhausted(error)):
            return True
        if is_foreign and "Too many open files" in str(error):
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
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even for this list is one left
        return 0
    return (sys.maxsize if soft == resource.RLIM_INFINITY else soft) - taken
