"""The work of the engine of a rank, in numbers. Values: the engine makes them, metrics add them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["NO_COUNTS", "Counts", "SetCounts"]


@dataclass(frozen=True, slots=True)
class SetCounts:
    """The work of one rank for one process set.

    ``operations`` counts tensors by operation, such as "allreduce", and ``bytes`` are theirs on this rank. They ran in
    ``batches``, which could have held ``capacity`` bytes, that is the fusion threshold for each. ``late_seconds`` is
    how long this rank waited until all ranks had submitted a batch, ``inside_seconds`` how long it waited for them
    inside operations, as far as the backend can tell, and ``backend_seconds`` the rest of the time in the backend.
    ``waits`` counts the batches that waited for a millisecond or longer. ``introduced`` requests went to the
    coordinator in full; it knew the others by their number, or was not asked. ``failures`` counts tensors that ended
    with an error.
    """

    operations: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    batches: int = 0
    capacity: int = 0
    late_seconds: float = 0.0
    inside_seconds: float = 0.0
    backend_seconds: float = 0.0
    waits: int = 0
    introduced: int = 0
    failures: int = 0

    @property
    def tensors(self) -> int:
        """The number of operations of all kinds."""
        return sum(self.operations.values())

    @property
    def waiting_seconds(self) -> float:
        """How long this rank waited for others."""
        return self.late_seconds + self.inside_seconds

    @property
    def tensors_per_batch(self) -> float:
        """How many tensors travel together, on average; 0 before the first batch."""
        return self.tensors / self.batches if self.batches else 0.0

    @property
    def fusion_fill(self) -> float:
        """The part of the fusion threshold that the average batch fills; 0 without fusion."""
        return self.bytes / self.capacity if self.capacity else 0.0

    @property
    def cache_hits(self) -> int:
        """The tensors whose request did not travel in full."""
        return max(0, self.tensors - self.introduced)

    def __add__(self, other: SetCounts) -> SetCounts:
        names = self.operations.keys() | other.operations.keys()
        operations = {name: self.operations.get(name, 0) + other.operations.get(name, 0) for name in sorted(names)}
        return SetCounts(operations, *(getattr(self, name) + getattr(other, name) for name in _SUMS))

    def as_dict(self) -> dict[str, Any]:
        """All numbers, those that are computed included, for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in _COMPUTED}


_SUMS = tuple(name for name in SetCounts.__dataclass_fields__ if name != "operations")
_COMPUTED = ("tensors", "waiting_seconds", "tensors_per_batch", "fusion_fill", "cache_hits")


@dataclass(frozen=True, slots=True)
class Counts:
    """The work of one rank: ``sets`` by the id of the process set, and the control messages between ranks."""

    sets: Mapping[int, SetCounts] = field(default_factory=dict)
    messages_sent: int = 0
    messages_received: int = 0

    def __add__(self, other: Counts) -> Counts:
        ids = sorted(self.sets.keys() | other.sets.keys())
        none = SetCounts()
        return Counts(
            {id: self.sets.get(id, none) + other.sets.get(id, none) for id in ids},
            self.messages_sent + other.messages_sent,
            self.messages_received + other.messages_received,
        )


NO_COUNTS = Counts()
