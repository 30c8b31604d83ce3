"""Records of one row that are made together: most of the time goes into text, and less into one large text."""

from __future__ import annotations

from functools import lru_cache

from collectives.timeline.records import Moment, Record, Row, text

__all__ = ["Draft", "template"]

LARGEST = 512
"""So many records at most become one text, which is some 60 KB then."""
TIME = Moment(0.0, "%s")


class Draft:
    """The next records of ``row``, which :meth:`finish` appends to ``records`` as one text.

    The first of them puts the draft into ``begun``, for the owner, who finishes all drafts there. A draft with LARGEST
    records finishes itself.
    """

    __slots__ = ("_begun", "_records", "_row", "_templates", "_values")

    def __init__(self, row: Row, begun: list[Draft], records: list[Record]) -> None:
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
