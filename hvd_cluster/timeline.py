"""Begins and ends the timeline while a job runs: a file for Chrome's trace viewer and Perfetto."""

from __future__ import annotations

import logging
import os

from collectives.api import InvalidRequestError
from hvd_cluster import basics

__all__ = ["start_timeline", "stop_timeline"]

logger = logging.getLogger(__name__)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the work of the ranks from now on, into the file ``file_path`` of rank 0, which is replaced.

    All ranks call it; those that do not are not recorded. With ``mark_cycles`` each decision about the next batches is
    marked. A call with the path that is recorded already does nothing; one with another path ends the recording
    before. A file that cannot be written is logged, and training goes on. Raises InvalidRequestError for a path that
    is none, NotInitializedError before ``init()``.
    """
    path = os.fspath(file_path) if isinstance(file_path, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidRequestError(f"start_timeline(file_path={file_path!r}) must be the path of a file")
    basics.record(path, bool(mark_cycles))


def stop_timeline() -> None:
    """Complete the file of the timeline. Raises NotInitializedError before ``init()``."""
    if not basics.stop_recording():
        logger.warning("stop_timeline() does nothing: no timeline is recorded; start_timeline(path) begins one")
