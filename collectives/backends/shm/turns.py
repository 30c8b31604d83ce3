"""Taking turns on a core, where ranks are more than cores."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["core", "modest"]

core = ctypes.PyDLL(None).sched_getcpu
"""The core that the calling thread runs on (sched_getcpu(3))."""


@contextmanager
def modest() -> Iterator[None]:
    """Whoever the calling thread shares its core with is not interrupted when this thread wakes.

    It waits for its turn as threads of SCHED_BATCH do (sched(7)). A thread that has another policy than the default one
    keeps it, and so does everyone where the system allows no change.
    """
    changed = os.sched_getscheduler(0) == os.SCHED_OTHER and _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        if changed:
            _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> bool:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True
