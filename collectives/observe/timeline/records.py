"""Records of the trace-event format as JSON, which lacks only the process id: the document gives one to each row."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

MICROSECONDS = 1e6
PID = "\0"
"""The place of the process id in a text. JSON has no such character."""


class TraceRow(NamedTuple):
    """A row of the viewer, which calls it a process: a tensor or the job, with a lane for each rank, or a rank.

    ``rank`` is that of the row of a rank, -1 for a tensor, -2 for the job.
    """

    name: str
    rank: int = -1

    @property
    def is_tensor(self) -> bool:
        """Whether it is the row of a tensor."""
        return self.rank == -1


JOB = TraceRow("job", -2)


class Record(NamedTuple):
    """``text`` is one record, or several of one row with commas between them; PID stands for the id of the row."""

    row: TraceRow
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


def tensor_row(name: str, process_set: int) -> TraceRow:
    """The row of a tensor, which has its name as Horovod has it, and the process set unless that has all ranks."""
    return TraceRow(f"{name} (process set {process_set})" if process_set else name)


def rank_row(rank: int) -> TraceRow:
    """The row of a rank."""
    return TraceRow(f"rank {rank}", rank)


def quoted(value: object) -> str:
    """``value`` as JSON."""
    return json.dumps(value)


def text(phase: str, lane: int, moment: Moment, fields: str) -> str:
    """A record of ``phase`` on ``lane`` with more ``fields``, as JSON behind a comma."""
    return f'{{"pid":{PID},"ph":"{phase}","tid":{lane},"ts":{moment.text}{fields}}}'


LARGEST = 512
"""The largest number of records in one text, of some 60 KB."""
TIME = Moment(0.0, "%s")


class Draft:
    """The next records of ``row``, which :meth:`finish` appends to ``records`` as one text.

    The first of them puts the draft into ``begun``, for the owner, who finishes all drafts there. A draft with LARGEST
    records finishes itself.
    """

    __slots__ = ("_begun", "_records", "_row", "_templates", "_values")

    def __init__(self, row: TraceRow, begun: list[Draft], records: list[Record]) -> None:
        self._row = row
        self._begun = begun
        self._records = records
        self._templates: list[str] = []
        self._values: list[str] = []

    def add(self, template: str, *values: str) -> None:
        """Add a record, or several: ``template`` with one of ``values`` for each %s."""
        if not self._templates:
            self._begun.append(self)
        elif len(self._templates) >= LARGEST:
            self.finish()
        self._templates.append(template)
        self._values += values

    def finish(self) -> None:
        """Make a text of the records."""
        made = ",\n".join(self._templates) % tuple(self._values)
        self._records.append(Record(self._row, made))
        self._templates.clear()
        self._values.clear()


@lru_cache(4096)
def template(phase: str, lane: int, fields: str) -> str:
    """A record of ``phase`` on ``lane`` with more ``fields``, as JSON behind a comma. %s stands for the time."""
    return text(phase, lane, TIME, fields)
