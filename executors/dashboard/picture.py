"""Pure: where the live page is served, and what it shows."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from collectives import LOOPBACK, Snapshot
from executors.api import worker_id
from executors.job.worlds import Published

LARGEST_PORT = 65535
FORM = "an address and a port, such as 127.0.0.1:8265, 0.0.0.0:0 for any free port, or [::1]:8265"


@dataclass(frozen=True, slots=True)
class Address:
    """An address of this host, and a port; 0: any free one."""

    host: str = LOOPBACK
    port: int = 0

    @classmethod
    def of(cls, given: object, name: str = "dashboard") -> Address | None:
        """What the user has ``given`` as ``name``; None for no page. Raises ValueError.

        True means any free port of the loopback interface; text is read by :meth:`parse`.
        """
        if given is None or given is False:
            return None
        if given is True:
            return cls()
        try:
            return cls.parse(given if isinstance(given, str) else "")
        except ValueError as error:
            raise ValueError(f"{name} is {given!r}, but must be True or {error}") from None

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in ``text``; raises ValueError, which says what is allowed."""
        host, colon, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        is_number = port.isascii() and port.isdigit() and int(port) <= LARGEST_PORT
        if not (colon and host and host.isprintable() and " " not in host and is_number):
            raise ValueError(FORM)
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


RATE_SECONDS = 5.0
"""Rates are those of the last seconds."""
SILENT_SECONDS = 5.0
"""A rank without a snapshot for so long is called silent; in a large job, later."""
RUNS = "runs"
RATES = {"batches": "batches", "bytes": "nbytes", "samples": "samples", "steps": "steps"}
KEPT_LINES = 50
KEPT_ROUNDS = 100
LONGEST_LINE = 500
COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""The sequences by which programs colour their lines in a terminal."""


@dataclass(slots=True)
class ShownWorker:
    """A worker: its snapshots of the last seconds, and when the last one came."""

    snapshots: deque[Snapshot] = field(default_factory=deque)
    heard: float = 0.0

    @property
    def last(self) -> Snapshot:
        """The last snapshot."""
        return self.snapshots[-1]

    def take(self, snapshot: Snapshot, now: float) -> None:
        """Add ``snapshot``; numbers that fall are those of another process."""
        if self.snapshots and snapshot.pid != self.last.pid:
            self.snapshots.clear()
        self.snapshots.append(snapshot)
        self.heard = now
        while len(self.snapshots) > 2 and snapshot.time - self.snapshots[1].time >= RATE_SECONDS:
            self.snapshots.popleft()

    def rate(self, name: str) -> float:
        """How much the number ``name`` grows in a second."""
        first, last = self.snapshots[0], self.last
        seconds = last.time - first.time
        return (getattr(last, name) - getattr(first, name)) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """A world that was published at ``time``, with so many ``ranks``, for the reason ``text``."""

    number: int
    time: float
    ranks: int
    text: str


@dataclass(slots=True)
class Picture:
    """The state of ``job``, which starts with ``size`` ranks. Times are seconds of one clock, that of the driver."""

    job: str
    size: int
    workers: dict[str, ShownWorker] = field(default_factory=dict)
    lines: dict[str, deque[tuple[str, str]]] = field(default_factory=dict)
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))
    world: Published | None = None
    former: set[str] = field(default_factory=set)
    """The workers that left with the last change. Their last lines may still come."""
    over: str = ""

    # What happens.

    def hear(self, worker: str, snapshot: Snapshot, now: float) -> None:
        """``worker`` has sent ``snapshot``."""
        self.workers.setdefault(worker, ShownWorker()).take(snapshot, now)

    def publish(self, world: Published, now: float) -> None:
        """The driver has published ``world``."""
        if world.is_over:
            self.end(world.text)
            return
        members = {worker for worker, _ in world.workers}
        self._forget(self.former - members)
        self.former = {worker for worker, _ in (self.world.workers if self.world else ()) if worker not in members}
        self.world = world
        self.size = len(world.workers)
        text = world.text if self.rounds else "the start"
        self.rounds.append(Round(world.round, now, self.size, text))

    def _forget(self, workers: Iterable[str]) -> None:
        """Drop all that is known of ``workers``: a long job loses very many."""
        for worker in workers:
            self.workers.pop(worker, None)
            self.lines.pop(worker, None)

    def tell(self, number: int, line: str) -> None:
        """The world of round ``number`` has formed; ``line`` says how, with what was learned about losses since."""
        text = line.removeprefix(f"world {number}: ").partition(", ")[2] or line
        told = [replace(each, text=text) if each.number == number else each for each in self.rounds]
        self.rounds = deque(told, KEPT_ROUNDS)

    def write(self, worker: str, stream: str, line: str) -> None:
        """``worker`` has written ``line`` to ``stream``."""
        self.lines.setdefault(worker, deque(maxlen=KEPT_LINES)).append((stream, COLOURS.sub("", line)[:LONGEST_LINE]))

    def end(self, text: str) -> None:
        """The job is over, because of ``text``."""
        self.over = self.over or text or "the job is over"

    # What the page shows.

    def as_dict(self, now: float) -> dict[str, Any]:
        """Everything, for JSON: numbers, text, lists and dicts."""
        ranks = [self._rank(rank, worker, host, now) for rank, worker, host in self._places()]
        first = self._first()
        return {
            "job": self.job,
            "over": self.over,
            "size": self.size,
            "round": self._round(first),
            "batches_per_second": _most(ranks, "batches_per_second"),
            "bytes_per_second": _most(ranks, "bytes_per_second"),
            "steps_per_second": _most(ranks, "steps_per_second"),
            "samples_per_second": sum(each["samples_per_second"] for each in ranks),
            "has_samples": any(each.last.samples for each in self.workers.values()),
            "has_steps": any(each.last.steps for each in self.workers.values()),
            "lost_steps": first.lost_steps if first else 0,
            "recording": first.recording if first else "",
            "ranks": ranks,
            "stalls": self._stalls(),
            "newcomers": self._newcomers(ranks, now),
            "rounds": [_shown(each, now) for each in reversed(self.rounds)],
        }

    def _round(self, first: Snapshot | None) -> int:
        if self.world is not None:
            return self.world.round
        return first.round if first else 0

    def _places(self) -> list[tuple[int, str, str]]:
        """Rank, worker and host of each member of the present world."""
        if self.world is not None:
            slots = self.world.slots()
            found = [(slot.rank, worker, slot.host) for worker, slot in slots.items()]
        else:
            numbers = range(self.size)
            found = [(number, worker_id(number), self._host(worker_id(number))) for number in numbers]
        return sorted(found)

    def _host(self, worker: str) -> str:
        return self.workers[worker].last.host if worker in self.workers else ""

    def _rank(self, rank: int, worker: str, host: str, now: float) -> dict[str, Any]:
        known = self.workers.get(worker)
        shown: dict[str, Any] = {
            "rank": rank,
            "worker": worker,
            "host": host,
            "state": self._state(known, now),
            "slow": self._slow(rank),
            "lines": [list(each) for each in self.lines.get(worker, ())],
        }
        going = known if shown["state"] == RUNS else None  # the last numbers of a silent rank are old
        rates = {f"{name}_per_second": going.rate(field) if going else 0.0 for name, field in RATES.items()}
        waiting = min(1.0, max(0.0, going.rate("waiting"))) if going else 0.0
        pid, batch = (known.last.pid, known.last.batch) if known else (0, None)
        return {**shown, **rates, "waiting_share": waiting, "pid": pid, "batch": batch}

    def _state(self, known: ShownWorker | None, now: float) -> str:
        if known is None:
            return "has not called init() yet"
        silence = now - known.heard
        is_silent = silence >= max(SILENT_SECONDS, SILENT_SECONDS * self.size / 64) and not self.over
        return f"silent for {silence:.0f} s" if is_silent else RUNS

    def _slow(self, rank: int) -> str:
        """Why ``rank`` is a straggler; empty if it is none. Rank 0 knows."""
        first = self._first()
        reasons = [each for each in (first.slow if first else ()) if each.rank == rank]
        texts = [f"the others wait for it for {each.share:.0%} of their time ({each.cause})" for each in reasons]
        return "; ".join(texts)

    def _first(self) -> Snapshot | None:
        """The last snapshot of rank 0, which knows of stragglers and stalls."""
        worker = "worker-0" if self.world is None else self.world.worker_of(0)
        known = self.workers.get(worker or "")
        return known.last if known else None

    def _stalls(self) -> list[dict[str, Any]]:
        first = self._first()
        return [
            {
                "name": each.name,
                "process_set": each.process_set,
                "missing": list(each.missing),
                "seconds": each.seconds + each.age,
            }
            for each in (first.stalls if first else ())
        ]

    def _newcomers(self, members: list[dict[str, Any]], now: float) -> list[str]:
        """Workers that are in no world yet."""
        known = {each["worker"] for each in members}
        others = [name for name, each in self.workers.items() if name not in known]
        return [name for name in others if now - self.workers[name].heard < SILENT_SECONDS]


def _shown(entry: Round, now: float) -> dict[str, Any]:
    return {"number": entry.number, "ago": now - entry.time, "ranks": entry.ranks, "text": entry.text}


def _most(ranks: list[dict[str, Any]], name: str) -> float:
    return max((float(each[name]) for each in ranks), default=0.0)
