"""The log when the program has not set up logging: standard error, one line for each record, in Horovod's format.

Every line names its rank and, as far as they are known, the round and the worker of an elastic job, the batch and the
tensors. These are also attributes of the record: see :class:`Named`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("collectives", "executors", "hvd_cluster")
"""A wheel has the first two below the third: see ``scripts/wheel_layout.py``."""
LOGGERS = tuple(package for package in PACKAGES if not any(package.startswith(f"{other}.") for other in PACKAGES))
LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
LETTERS = {"DEBUG": "D", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "F"}
SHOWN_TENSORS = 3
_ROOT = Path(__file__).resolve().parents[__name__.count(".")]


@dataclass(frozen=True, slots=True)
class Identity:
    """This process: its rank and, in an elastic job, the round of its world and its id as a worker."""

    rank: int
    round: int | None = None
    worker: str = ""


def about(tensors: Sequence[str], batch: int | None = None) -> dict[str, Any]:
    """The ``extra`` of a record about ``tensors`` and the number of their batch, None while they have none."""
    return {"tensors": tuple(tensors), "batch": batch}


class Named(logging.Filter):
    """Gives each record ``rank``, ``round``, ``worker``, ``batch``, ``tensors``, and all of them as the text ``id``."""

    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self.identity = identity

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids to ``record``; every record passes."""
        own, tensors = self.identity, getattr(record, "tensors", ())
        batch: int | None = getattr(record, "batch", None)
        record.rank, record.round, record.worker = own.rank, own.round, own.worker
        record.batch, record.tensors = batch, tensors
        parts = {"round": own.round, "worker": own.worker or None, "batch": batch, "tensors": _listed(tensors)}
        record.id = " ".join([str(own.rank), *(f"{key}={value}" for key, value in parts.items() if value is not None)])
        return True


def _listed(tensors: Sequence[str]) -> str | None:
    more = len(tensors) - SHOWN_TENSORS
    shown = ",".join(tensors[:SHOWN_TENSORS])
    return (f"{shown},and {more} more" if more > 0 else shown) or None


class _Format(logging.Formatter):
    """``[2026-01-31 12:00:00.123456: W collectives/stalls/inspector.py:84] [0]: message``."""

    def __init__(self, hide_time: bool) -> None:
        time = "" if hide_time else "%(asctime)s: "
        super().__init__(f"[{time}%(letter)s %(place)s:%(lineno)d] [%(id)s]: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = LETTERS.get(record.levelname, record.levelname)
        record.place = record.pathname.removeprefix(f"{_ROOT}/")
        return super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        microseconds = int(record.created % 1 * 1e6)
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.created))}.{microseconds:06d}"


class _Fallback(logging.Handler):
    """Silent where the root logger has handlers: the program decides then."""

    def __init__(self, hide_time: bool, identity: Identity) -> None:
        super().__init__()
        self.hide_time = hide_time
        self.named = Named(identity)
        self.setFormatter(_Format(hide_time))
        self.addFilter(self.named)

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            try:
                sys.stderr.write(self.format(record) + "\n")
            except Exception:  # noqa: BLE001
                self.handleError(record)


def configure(level: str, hide_time: bool, identity: Identity) -> None:
    """Let our loggers write records of at least ``level``, in lines that name ``identity``; may be called again."""
    if not _rename(LOG_LEVELS[level], hide_time, identity):
        handler = _Fallback(hide_time, identity)
        for package in LOGGERS:
            logger = logging.getLogger(package)
            logger.setLevel(LOG_LEVELS[level])
            for old in _fallbacks(logger):
                logger.removeHandler(old)
            logger.addHandler(handler)


def _rename(level: int, hide_time: bool, identity: Identity) -> bool:
    """Let the handlers name ``identity`` from now on, if nothing else changes; return whether that is so.

    A new level makes every logger of the process forget what it knows about levels, which takes longer than the rest.
    """
    loggers = [logging.getLogger(package) for package in LOGGERS]
    handlers = [handler for logger in loggers for handler in _fallbacks(logger)]
    is_same = len(handlers) == len(loggers) and all(handler.hide_time == hide_time for handler in handlers)
    if not is_same or any(logger.level != level for logger in loggers):
        return False
    for handler in handlers:
        handler.named.identity = identity
    return True


def _fallbacks(logger: logging.Logger) -> list[_Fallback]:
    return [handler for handler in logger.handlers if isinstance(handler, _Fallback)]
