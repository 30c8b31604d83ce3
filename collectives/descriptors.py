"""File descriptors: how to recognise that a process has none left, and the limit for strangers."""

from __future__ import annotations

import errno
import os
import resource

__all__ = ["EXHAUSTED", "are_exhausted", "share_of_strangers"]

EXHAUSTED = "this process has no file descriptor left; raise the limit of ulimit -n"
SPARE_DESCRIPTORS = 16
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def are_exhausted(error: OSError) -> bool:
    """Whether ``error`` means that this process, or this host, has no file descriptor left."""
    return error.errno in NO_DESCRIPTORS


def share_of_strangers(reserved: int, least: int, most: int) -> int:
    """The number of unauthenticated connections that a listener may hold at once, from ``least`` to ``most``.

    That is half of the descriptors that are free now, without ``reserved`` ones and a few to spare.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - len(os.listdir("/proc/self/fd")) - reserved - SPARE_DESCRIPTORS
    return max(least, min(most, free // 2))
