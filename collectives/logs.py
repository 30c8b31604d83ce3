"""The engine's log when the program has not set up logging: standard error, one line for each record."""

from __future__ import annotations

import logging
import sys

__all__ = ["PACKAGES", "configure"]

PACKAGES = ("collectives", "executors", "hvd_cluster")
LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class _Fallback(logging.Handler):
    """Silent where the root logger has handlers: the program decides then."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            try:
                sys.stderr.write(self.format(record) + "\n")
            except Exception:  # noqa: BLE001
                self.handleError(record)


def configure(level: str, hide_time: bool, rank: int) -> None:
    """Let our loggers write records of at least ``level``, in lines that name the rank; may be called again."""
    time = "" if hide_time else "%(asctime)s "
    handler = _Fallback()
    handler.setFormatter(logging.Formatter(f"{time}[rank {rank}] %(levelname)s %(name)s: %(message)s"))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(LEVELS[level])
        for old in [old for old in logger.handlers if isinstance(old, _Fallback)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
