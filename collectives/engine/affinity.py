"""Binds threads to cores."""

from __future__ import annotations

import logging
import os

__all__ = ["pin"]

logger = logging.getLogger(__name__)


def pin(core: int) -> None:
    """Let the calling thread, and the threads it starts, run on ``core`` only. A warning where the system refuses."""
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        logger.warning("cannot bind the thread to core %d: %s; it runs where the system puts it", core, error.strerror)
