"""The lanes of one rank: what is open on each, and the records that open and close it."""

from __future__ import annotations

from collections.abc import Iterable

from collectives.events import Submitted
from collectives.timeline.records import Record, quoted, rank_row, tensor_row

__all__ = ["RankLane", "TensorLane"]

WITHOUT_BACKEND = ("JOIN", "ADD_PROCESS_SET", "REMOVE_PROCESS_SET")
"""Operations that are over when they are decided."""
COUNTER_MICROSECONDS = 1000.0
"""The shortest time between two values of the bytes in flight, other than those at the ends of a batch."""
BATCH_LANES, PHASE_LANES = 0, 100
"""The numbers of the first lane of batches, and of that of phases, in the row of a rank."""


class TensorLane:
    """A tensor on one rank: waits for the other ranks, waits for its batch, is in its backend.

    ``flow`` is the id of the arrow from the submission to the batch; empty where the submission was not seen.
    """

    def __init__(self, name: str, process_set: int, rank: int, records: list[Record]) -> None:
        self._row = tensor_row(name, process_set)
        self._tid = rank
        self._records = records
        self._open: list[str] = []
        self._latest = 0.0
        self._heard: dict[int, float] = {}
        self._next: tuple[Submitted, float, str] | None = None
        self._args = ""
        self._nbytes = 0
        self.flow = ""

    def submit(self, event: Submitted, ts: float, flow: str) -> None:
        """The tensor waits for the other ranks. If the end of its last operation is not known yet, that comes first."""
        if self._open:
            self._next = event, ts, flow
            return
        operation = event.operation.upper().replace(" ", "_")
        self._begin(f"NEGOTIATE_{operation}", min([ts, *self._heard.values()]), "")
        for rank, time in self._heard.items():
            self._tick(rank, time)
        self._heard.clear()
        self._arrow(flow, ts)
        self._nbytes, self.flow = event.nbytes, flow
        self._args = f',"args":{{"dtype":{quoted(event.dtype)},"shape":{quoted(str(list(event.shape)))}}}'

    def hear(self, ranks: Iterable[int], ts: float) -> None:
        """The coordinator knows that ``ranks`` have submitted the tensor, perhaps before this rank has."""
        for rank in ranks:
            if self._is_negotiating:
                self._tick(rank, ts)
            else:
                self._heard[rank] = ts

    @property
    def is_idle(self) -> bool:
        """Whether the tensor is not in flight."""
        return not (self._open or self._heard)

    @property
    def _is_negotiating(self) -> bool:
        return bool(self._open) and self._open[-1].startswith("NEGOTIATE_")

    def decide(self, ts: float) -> None:
        """The tensor waits for its batch; one without a backend is done."""
        if not self._is_negotiating:
            return
        operation = self._open[-1].removeprefix("NEGOTIATE_")
        self._end(ts, "")
        if operation not in WITHOUT_BACKEND:
            self._begin(operation, ts, "")
            self._begin("QUEUE", ts, "")

    def start(self, operation: str, activity: str, ts: float) -> None:
        """The backend begins; this rank may not have submitted the tensor, if it has joined."""
        self.decide(ts)
        if self._open and self._open[-1] == "QUEUE":
            self._end(ts, "")
        elif not self._open:
            self._heard.clear()
            self._begin(operation, ts, "")
        self._begin(activity, ts, "")

    def finish(self, ts: float) -> int:
        """The operation is over; returns the bytes that were submitted."""
        self.close(ts)
        nbytes, self._nbytes, self._args, self.flow = self._nbytes, 0, "", ""
        if self._next is not None:
            following, self._next = self._next, None
            self.submit(*following)
        return nbytes

    def close(self, ts: float) -> None:
        """End everything that is open."""
        while self._open:
            self._end(ts, self._args if len(self._open) == 1 else "")

    def instant(self, name: str, ts: float, args: str) -> None:
        """Something happened to the tensor."""
        self._write("i", ts, f',"name":"{name}","s":"t","args":{args}')

    def _begin(self, name: str, ts: float, more: str) -> None:
        self._open.append(name)
        self._write("B", ts, f',"name":"{name}"{more}')

    def _end(self, ts: float, more: str) -> None:
        name = self._open.pop()
        self._write("E", ts, f',"name":"{name}"{more}')

    def _tick(self, rank: int, ts: float) -> None:
        self._write("X", ts, f',"dur":0,"name":"{rank}"')

    def _arrow(self, flow: str, ts: float) -> None:
        self._write("s", ts, f',"id":"{flow}","name":"execution","cat":"execution"')

    def _write(self, phase: str, ts: float, rest: str) -> None:
        self._latest = ts = max(ts, self._latest)
        self._records.append(Record(self._row, f'"ph":"{phase}","tid":{self._tid},"ts":{ts:.1f}{rest}}}'))


class RankLane:
    """A rank: its batches, their phases, and the bytes in flight."""

    def __init__(self, rank: int, records: list[Record]) -> None:
        self._row = rank_row(rank)
        self._records = records
        self._batches: dict[int, int] = {}
        self._latest: dict[int, float] = {}
        self._phases: dict[str, int] = {}
        self._bytes = 0
        self._shown = 0.0

    def begin(self, batch: int, activity: str, ts: float, args: str) -> tuple[int, float]:
        """A batch begins, on the first free lane; returns the lane and the time there."""
        self.end(batch, ts)
        used = set(self._batches.values())
        lane = next(lane for lane in range(BATCH_LANES, PHASE_LANES + len(used)) if lane not in used)
        self._batches[batch] = lane
        self._name(lane, "batches" if lane == BATCH_LANES else f"batches {lane + 1}")
        return lane, self._write("B", lane, ts, f',"name":"{activity}","args":{args}')

    def end(self, batch: int, ts: float) -> None:
        """A batch is over; does nothing if it has not begun."""
        lane = self._batches.pop(batch, None)
        if lane is not None:
            self._write("E", lane, ts, "")

    def arrive(self, flow: str, place: tuple[int, float]) -> None:
        """An arrow ends at a batch, at the lane and the time that :meth:`begin` returned."""
        lane, ts = place
        self._write("f", lane, ts, f',"id":"{flow}","name":"execution","cat":"execution","bp":"e"')

    def phase(self, name: str, begin: float, end: float, batch: int) -> None:
        """A phase is over. Those of one name that overlap are on lanes of their own."""
        slot, label = 1, name
        while begin < self._latest.get(lane := self._phases.setdefault(label, PHASE_LANES + len(self._phases)), 0.0):
            slot += 1
            label = f"{name} {slot}"
        self._name(lane, label)
        self._write("X", lane, begin, f',"dur":{max(0.0, end - begin):.1f},"name":"{name}","args":{{"batch":{batch}}}')
        self._latest[lane] = max(begin, end)

    def instant(self, name: str, ts: float, scope: str, args: str = "{}") -> None:
        """Something happened to the rank; ``scope`` is that of the format: t, p or g."""
        self._records.append(
            Record(self._row, f'"ph":"i","tid":0,"ts":{ts:.1f},"name":"{name}","s":"{scope}","args":{args}}}')
        )

    def count(self, nbytes: int, ts: float, always: bool = False) -> None:
        """``nbytes`` more are in flight."""
        self._bytes += nbytes
        if always or ts - self._shown >= COUNTER_MICROSECONDS:
            self.show_bytes(ts)

    def show_bytes(self, ts: float) -> None:
        """Record the bytes in flight."""
        self._shown = max(ts, self._shown)
        self._records.append(
            Record(
                self._row,
                f'"ph":"C","tid":0,"ts":{self._shown:.1f},"name":"bytes in flight","args":{{"bytes":{self._bytes}}}}}',
            )
        )

    def close(self, ts: float) -> None:
        """End everything that is open."""
        for batch in list(self._batches):
            self.end(batch, ts)

    def _name(self, lane: int, name: str) -> None:
        if lane not in self._latest:
            self._latest[lane] = 0.0
            args = quoted({"name": name})
            self._records.append(Record(self._row, f'"ph":"M","tid":{lane},"name":"thread_name","args":{args}}}'))

    def _write(self, phase: str, lane: int, ts: float, rest: str) -> float:
        ts = max(ts, self._latest.get(lane, 0.0))
        self._latest[lane] = ts
        self._records.append(Record(self._row, f'"ph":"{phase}","tid":{lane},"ts":{ts:.1f}{rest}}}'))
        return ts
