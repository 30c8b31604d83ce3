"""The present numbers of a rank, for the live page of its job. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from collectives.engine.counters import SetCounts
from collectives.observe.metrics.values import Metrics

LAST_RECORDING = "record/last"
"""The key of the number of the last request for a recording."""
LONG_SECONDS = 1.0
"""A wait counts before it is over when it takes longer than operations do."""
SNAPSHOT_PREFIX = "live/"
"""The common beginning of the keys in the store of the job."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A straggler: the others wait for ``rank`` for this ``share`` of their time, because of ``cause``."""

    rank: int
    share: float
    cause: str


@dataclass(frozen=True, slots=True)
class Stall:
    """The tensor ``name`` of ``process_set`` waits for the ranks ``missing``.

    It had waited for ``seconds`` when this was reported, ``age`` s ago.
    """

    name: str
    missing: tuple[int, ...]
    seconds: float
    age: float
    process_set: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """The request number ``number`` of the page: record a timeline of ``seconds`` into ``path`` of rank 0."""

    number: int
    path: str
    seconds: float

    def encode(self) -> bytes:
        """The value in the store."""
        return bytes(msgpack.packb([self.number, self.path, self.seconds]))

    @classmethod
    def decode(cls, data: bytes) -> Recording:
        """The reverse of :meth:`encode`; raises ValueError or TypeError."""
        number, path, seconds = msgpack.unpackb(data)
        return cls(int(number), str(path), float(seconds))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The numbers of one rank at ``time``, in monotonic seconds of its own host.

    ``batches``, ``nbytes`` and ``waiting`` seconds are those of all process sets since the first world of the process,
    ``samples`` those that the script has counted, and ``steps`` those of its optimizers. ``recording`` says what became
    of the last request to record. ``batch`` is the number of the last batch that has ended in this world.
    """

    time: float
    rank: int
    size: int
    round: int
    host: str
    pid: int
    batches: int = 0
    nbytes: int = 0
    waiting: float = 0.0
    samples: int = 0
    failures: int = 0
    lost_steps: int = 0
    slow: tuple[Slow, ...] = ()
    stalls: tuple[Stall, ...] = ()
    recording: str = ""
    steps: int = 0
    batch: int | None = None

    @classmethod
    def of(
        cls, metrics: Metrics, time: float, host: str, pid: int, stalls: Iterable[Stall] = (), recording: str = ""
    ) -> Snapshot:
        """That of a process with ``metrics``."""
        total = sum(metrics.process_sets.values(), SetCounts())
        slow = tuple(Slow(each.rank, each.share, each.cause.value) for each in metrics.stragglers)
        return cls(
            time,
            metrics.rank,
            metrics.size,
            metrics.round,
            host,
            pid,
            total.batches,
            total.bytes,
            total.waiting_seconds + (metrics.waiting if metrics.waiting > LONG_SECONDS else 0.0),
            metrics.samples,
            total.failures,
            metrics.lost_steps,
            slow,
            tuple(stalls),
            recording,
            metrics.steps,
            metrics.batch,
        )

    def encode(self) -> bytes:
        """The value in the store."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        slow = [(each.rank, each.share, each.cause) for each in self.slow]
        stalls = [(each.name, each.missing, each.seconds, each.age, each.process_set) for each in self.stalls]
        return bytes(msgpack.packb({**plain, "slow": slow, "stalls": stalls}))

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """The reverse of :meth:`encode`, also for a rank of another version; raises ValueError or TypeError."""
        given: dict[str, Any] = msgpack.unpackb(data)
        if not isinstance(given, dict):
            raise TypeError(f"a snapshot is a map, not {type(given).__name__}")
        plain = {name: given[name] for name in _PLAIN if name in given}
        slow = tuple(Slow(*each) for each in given.get("slow", ()))
        stalls = tuple(Stall(name, tuple(missing), *numbers) for name, missing, *numbers in given.get("stalls", ()))
        return cls(**plain, slow=slow, stalls=stalls)


_PLAIN = tuple(field.name for field in fields(Snapshot) if field.name not in ("slow", "stalls"))


def snapshot_key(worker: str) -> str:
    """Where the snapshot of ``worker`` is in the store."""
    return f"{SNAPSHOT_PREFIX}{worker}"


def recording_key(number: int) -> str:
    """Where the request of this ``number`` is in the store, from 1 on."""
    return f"record/{number}"
