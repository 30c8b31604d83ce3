"""Records of the trace-event format as JSON, which lacks only the process id: the document gives one to each row."""

from __future__ import annotations

import json
from typing import NamedTuple

__all__ = [
    "JOB",
    "MICROSECONDS",
    "PID",
    "Moment",
    "Record",
    "Row",
    "duration",
    "quoted",
    "rank_row",
    "tensor_row",
    "text",
]

MICROSECONDS = 1e6
PID = "\0"
"""The place of the process id in a text. JSON has no such character."""


class Row(NamedTuple):
    """A row of the viewer, which calls it a process: a tensor or the job, with a lane for each rank, or a rank.

    ``rank`` is that of the row of a rank, -1 for a tensor, -2 for the job.
    """

    name: str
    rank: int = -1

    @property
    def is_tensor(self) -> bool:
        """Whether it is the row of a tensor."""
        return self.rank == -1


JOB = Row("job", -2)


class Record(NamedTuple):
    """``text`` is one record, or several of one row with commas between them; PID stands for the id of the row."""

    row: Row
    text: str


class Moment(NamedTuple):
    """Microseconds since the beginning of the timeline, also as JSON: several records of one event share it."""

    microseconds: float
    text: str

    @classmethod
    def at(cls, microseconds: float) -> Moment:
        """The moment."""
        return cls(microseconds, f"{microseconds:.1f}")


def duration(begin: float, end: float) -> str:
    """The microseconds between two moments as they are written: a span ends where its text says the next one begins."""
    return f"{round(end, 1) - round(begin, 1):.1f}"


def tensor_row(name: str, process_set: int) -> Row:
    """The row of a tensor, which has its name as Horovod has it, and the process set unless that has all ranks."""
    return Row(f"{name} (process set {process_set})" if process_set else name)


def rank_row(rank: int) -> Row:
    """The row of a rank."""
    return Row(f"rank {rank}", rank)


def quoted(value: object) -> str:
    """``value`` as JSON."""
    return json.dumps(value)


def text(phase: str, lane: int, moment: Moment, fields: str) -> str:
    """A record of ``phase`` on ``lane`` with more ``fields``, as JSON behind a comma."""
    return f'{{"pid":{PID},"ph":"{phase}","tid":{lane},"ts":{moment.text}{fields}}}'
