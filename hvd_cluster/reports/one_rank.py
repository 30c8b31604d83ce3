"""Output of one rank: a print, and a filter for logging."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from collectives import SettingsError
from executors import launcher_table
from hvd_cluster.core import basics

_show = print


def known_rank() -> int | None:
    """The rank of this process; before ``init()`` the one that its launcher has told it, 0 without a launcher.

    None for a newcomer of an elastic job, until its function runs. SettingsError for variables that tell no rank.
    """
    if basics.is_initialized():
        worlds = basics.worlds()
        return None if worlds is not None and worlds.is_alone else basics.rank()
    if os.environ.get("HOROVOD_NEWCOMER") == "1":
        return None
    place = launcher_table.place_of(os.environ)
    return _told_rank(os.environ.get("HOROVOD_RANK", "")) if place is None else place.rank


def _told_rank(text: str) -> int:
    if text.strip() and not text.strip().isdecimal():
        raise SettingsError(f"HOROVOD_RANK={text!r} must be a number, from 0; the launcher sets it")
    return int(text or 0)


def print_once(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = False,
    rank: int = 0,
) -> None:
    """``print(*values)`` on the rank ``rank``, and nothing on the others. Not a collective: one rank may call it alone.

    The other arguments are those of ``print``. Before ``hvd.init()`` the rank is the one that the launcher (hvdrun,
    mpirun, srun, jsrun, torchrun and so on) has told the process. A process without a launcher is rank 0. A newcomer of
    an elastic job has no rank until its function runs, and prints nothing. SettingsError before ``init()`` where the
    variables of a launcher tell no rank.
    """
    if known_rank() == rank:
        _show(*values, sep=sep, end=end, file=file, flush=flush)


class RankFilter(logging.Filter):
    """Lets the records of one rank through: ``handler.addFilter(hvd.RankFilter(0))``.

    ``rank`` is that rank, None for all. With ``add_rank`` each record has the attribute ``rank``, for ``%(rank)s`` in a
    format; it is None for a newcomer of an elastic job until its function runs. On a handler the filter sees all
    records; on a logger only those that are logged there, not those of the loggers below it. The rank is looked up for
    each record, so one filter serves before ``hvd.init()`` and in all worlds of an elastic job; see :func:`print_once`.
    Where no rank can be known, all records pass, with None.
    """

    def __init__(self, rank: int | None = 0, add_rank: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.add_rank = add_rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` passes."""
        own, is_known = None, False
        with contextlib.suppress(SettingsError):  # hvd.init() raises it
            own, is_known = known_rank(), True
        if self.add_rank:
            record.rank = own
        return self.rank is None or own == self.rank or not is_known
