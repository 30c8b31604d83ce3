"""Records of the trace-event format, as text that lacks only the process id, which the document gives to each row."""

from __future__ import annotations

import json
from typing import NamedTuple

__all__ = ["MICROSECONDS", "Record", "Row", "quoted", "rank_row", "tensor_row"]

MICROSECONDS = 1e6


class Row(NamedTuple):
    """A row of the viewer, which calls it a process: a tensor, with a lane for each rank, or a rank.

    ``rank`` is that of the row of a rank, -1 for a tensor.
    """

    name: str
    rank: int = -1


class Record(NamedTuple):
    """``text`` is the record as JSON from the first field on: ``"ph":"B",...}``."""

    row: Row
    text: str


def tensor_row(name: str, process_set: int) -> Row:
    """The row of a tensor, which has its name as Horovod has it, and the process set unless that has all ranks."""
    return Row(f"{name} (process set {process_set})" if process_set else name)


def rank_row(rank: int) -> Row:
    """The row of a rank."""
    return Row(f"rank {rank}", rank)


def quoted(value: object) -> str:
    """``value`` as JSON."""
    return json.dumps(value)
