"""How the threads of a timeline leave the cores to the training."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["give_way"]


def give_way() -> None:
    """Let this thread interrupt no other one when it wakes up: it gets its share of a core a little later.

    With as many ranks as cores, an interrupted rank holds up all others. Where a sandbox forbids it, nothing changes.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0 is the calling thread
