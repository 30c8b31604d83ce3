"""The lanes of one rank: the spans that are open on each, and the records that open and close it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from zlib import crc32

from collectives.events import Submitted
from collectives.observe.timeline.records import Draft, Moment, duration, quoted, template

WITHOUT_BACKEND = ("JOIN", "ADD_PROCESS_SET", "REMOVE_PROCESS_SET")
"""Operations that are over when they are decided."""
COUNTER_MICROSECONDS = 1000.0
"""The shortest time between two values of the bytes in flight, other than those at the ends of a batch."""
BATCH_LANES, PHASE_LANES = 0, 100
"""The numbers of the first lane of batches, and of that of phases, in the row of a rank."""
MOST_LANES = 900_000
"""The ids of the lanes of phases are below PHASE_LANES + MOST_LANES, and so below the ids of rows."""
FLOW = ',"id":"%s","name":"execution","cat":"execution"'
"""The id must be a hexadecimal number of 64 bits: Perfetto drops other arrows."""
BYTES = ',"name":"in flight","args":{"bytes":%s}'
NEGOTIATE = "NEGOTIATE_"
START = Moment.at(0.0)


class TensorLane:
    """A tensor on one rank: waits for the other ranks, waits for its batch, is in its backend.

    ``flow`` is the id of the arrow from the submission to the batch, in hexadecimal; empty where the submission was not
    seen.
    """

    def __init__(self, rank: int, draft: Draft) -> None:
        self._lane = rank
        self._draft = draft
        self._open: tuple[str, ...] = ()
        self._ended = START
        self._heard: dict[int, Moment] = {}
        self._next: tuple[Submitted, Moment, str] | None = None
        self._args = ""
        self._nbytes = 0
        self._is_named = False
        self.flow = ""

    def submit(self, event: Submitted, now: Moment, flow: str) -> None:
        """The tensor waits for the other ranks. If the end of its last operation is not known yet, that comes first."""
        if self._open:
            self._next = event, now, flow
            return
        waits = NEGOTIATE + event.operation.upper().replace(" ", "_")
        begin = max(self._ended, min([now, *self._heard.values()]))
        self._change(begin, (), (waits,), opened=(waits,))
        if self._heard:
            for rank, heard in self._heard.items():
                self._tick(rank, max(begin, heard))
            self._heard.clear()
            self._tick("SUBMITTED", max(begin, now))  # for Perfetto the arrow begins at the last tick
        self._draft.add(template("s", self._lane, FLOW), max(begin, now).text, flow)
        self._nbytes, self.flow, self._args = event.nbytes, flow, _shown(event.dtype, event.shape)

    def hear(self, ranks: Iterable[int], now: Moment) -> None:
        """The coordinator knows that ``ranks`` have submitted the tensor, perhaps before this rank has."""
        for rank in ranks:
            if self._is_negotiating:
                self._tick(rank, now)
            else:
                self._heard.pop(rank, None)  # the order is that of the times
                self._heard[rank] = now

    @property
    def is_idle(self) -> bool:
        """Whether the tensor is not in flight."""
        return not (self._open or self._heard)

    @property
    def _is_negotiating(self) -> bool:
        return len(self._open) == 1

    def decide(self, now: Moment) -> None:
        """The tensor waits for its batch; one without a backend is done."""
        if not self._is_negotiating:
            return
        (waits,) = self._open
        operation = waits.removeprefix(NEGOTIATE)
        if operation in WITHOUT_BACKEND:
            self._change(now, self._open, (), opened=())
        else:
            opened = operation, "QUEUE"
            self._change(now, self._open, opened, opened)

    def start(self, operation: str, activity: str, now: Moment) -> None:
        """The backend begins; this rank may not have submitted the tensor, if it has joined."""
        if len(self._open) > 1:
            operation, before = self._open
            self._change(now, (before,), (activity,), opened=(operation, activity))
        else:
            self._heard.clear()
            self._change(now, self._open, (operation, activity), opened=(operation, activity))

    def finish(self, now: Moment) -> int:
        """The operation is over; returns the bytes that were submitted."""
        self.close(now)
        nbytes, self._nbytes, self._args, self.flow = self._nbytes, 0, "", ""
        if self._next is not None:
            following, self._next = self._next, None
            self.submit(*following)
        return nbytes

    def close(self, now: Moment) -> None:
        """End everything that is open."""
        if self._open:
            inner, outer = _spans(self._lane, self._open[:0:-1], ()), self._open[0]
            last = template("E", self._lane, f',"name":"{outer}"%s')
            times = [now.text] * len(self._open)
            self._draft.add(f"{inner},\n{last}" if inner else last, *times, self._args)
            self._open, self._ended = (), now

    def instant(self, name: str, now: Moment, args: str) -> None:
        """Something happened to the tensor."""
        self._draft.add(template("i", self._lane, f',"name":"{name}","s":"t","args":%s'), now.text, args)

    def _change(self, now: Moment, ended: tuple[str, ...], begun: tuple[str, ...], opened: tuple[str, ...]) -> None:
        self._open = opened
        if not self._is_named:
            self._is_named = True
            name = f',"name":"thread_name","args":{{"name":"rank {self._lane}"}}'
            self._draft.add(template("M", self._lane, name), START.text)
        self._draft.add(_spans(self._lane, ended, begun), *[now.text] * (len(ended) + len(begun)))

    def _tick(self, name: int | str, now: Moment) -> None:
        self._draft.add(template("X", self._lane, f',"dur":0,"name":"{name}"'), now.text)


@lru_cache(4096)
def _spans(lane: int, ended: tuple[str, ...], begun: tuple[str, ...]) -> str:
    """Spans that end and begin at one moment; %s stands for it, once for each."""
    changes = [("E", name) for name in ended] + [("B", name) for name in begun]
    return ",\n".join([template(phase, lane, f',"name":"{name}"') for phase, name in changes])


@lru_cache(4096)
def _shown(dtype: str, shape: tuple[int, ...]) -> str:
    return f',"args":{{"dtype":"{dtype}","shape":"{list(shape)}"}}'


class JobLane:
    """The way of a rank into its first world."""

    def __init__(self, rank: int, draft: Draft) -> None:
        self._lane = rank
        self._draft = draft
        name = f',"name":"thread_name","args":{{"name":"rank {rank}"}}'
        draft.add(template("M", rank, name), START.text)

    def step(self, name: str, begin: float, end: float, args: str) -> None:
        """A step is over, in microseconds."""
        begin = max(0.0, begin)
        span = template("X", self._lane, f',"dur":%s,"name":"{name}","args":%s')
        self._draft.add(span, f"{begin:.1f}", duration(begin, max(begin, end)), args)


class RankLane:
    """A rank: its batches, their phases, and the bytes in flight."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._batches: dict[int, int] = {}
        self._named: set[str] = set()
        self._ends: dict[str, float] = {}
        self._bytes = 0
        self._shown = 0.0

    def begin(self, batch: int, activity: str, now: Moment, args: str) -> int:
        """A batch begins, on the first free lane, which is returned."""
        self.end(batch, now)
        used = set(self._batches.values())
        lane = next(lane for lane in range(BATCH_LANES, BATCH_LANES + len(used) + 1) if lane not in used)
        self._batches[batch] = lane
        self._name(lane, "batches" if lane == BATCH_LANES else f"batches {lane + 1}")
        self._draft.add(template("B", lane, f',"name":"{activity}","args":%s'), now.text, args)
        return lane

    def end(self, batch: int, now: Moment) -> None:
        """A batch is over; does nothing if it has not begun."""
        lane = self._batches.pop(batch, None)
        if lane is not None:
            self._draft.add(template("E", lane, ""), now.text)

    def arrive(self, flows: Iterable[str], lane: int, now: Moment) -> None:
        """Arrows end at the batch that begins on ``lane``."""
        arrow = template("f", lane, FLOW + ',"bp":"e"')
        for flow in flows:
            self._draft.add(arrow, now.text, flow)

    def phase(self, name: str, begin: float, end: float, args: str) -> None:
        """A phase is over, in microseconds. Those of one name that overlap are on lanes of their own.

        The number of a lane follows from its name: the next timeline of an elastic job goes on with it.
        """
        slot, label = 1, name
        while begin < self._ends.get(label, 0.0):
            slot += 1
            label = f"{name} {slot}"
        lane = _phase_lane(label)
        self._name(lane, label)
        begin = max(0.0, begin)
        self._ends[label] = end = max(begin, end)
        span = template("X", lane, f',"dur":%s,"name":"{name}","args":%s')
        self._draft.add(span, f"{begin:.1f}", duration(begin, end), args)

    def instant(self, name: str, now: Moment, scope: str, args: str = "{}") -> None:
        """Something happened to the rank; ``scope`` is that of the format: t, p or g."""
        self._draft.add(template("i", BATCH_LANES, f',"name":"{name}","s":"{scope}","args":%s'), now.text, args)

    def count(self, nbytes: int, now: Moment, always: bool = False) -> None:
        """``nbytes`` more are in flight."""
        self._bytes += nbytes
        if always or now.microseconds - self._shown >= COUNTER_MICROSECONDS:
            self.show_bytes(now)

    def show_bytes(self, now: Moment) -> None:
        """Record the bytes in flight."""
        self._shown = now.microseconds
        self._draft.add(template("C", BATCH_LANES, BYTES), now.text, str(self._bytes))

    def close(self, now: Moment) -> None:
        """End everything that is open."""
        for batch in list(self._batches):
            self.end(batch, now)

    def _name(self, lane: int, name: str) -> None:
        if name not in self._named:
            self._named.add(name)
            self._draft.add(template("M", lane, ',"name":"thread_name","args":%s'), START.text, quoted({"name": name}))


@lru_cache(256)
def _phase_lane(label: str) -> int:
    return PHASE_LANES + crc32(label.encode()) % MOST_LANES
