"""Copies of values that each rank has alone, kept where the others find them after that rank is lost."""

from __future__ import annotations

import logging
import pickle
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from collectives import HorovodInternalError, Operation
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.arrays import gathered
from hvd_cluster.ops.host_memory import shared_memory
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ops.submission import run

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 64
HEAD_BYTES = 24
"""Before a value: the number of its copy, the bytes of its pickle without arrays, and the number of arrays."""


class Kept(Protocol):
    """One copy of the values of all ranks."""

    def values(self) -> list[Any]:
        """Those of all ranks in their order, in memory that may be overwritten later."""


class Packed(NamedTuple):
    """A value that is ready to be copied: its pickle, and the memory of its arrays."""

    value: Any
    pickled: bytes
    arrays: Sequence[Bytes]

    @classmethod
    def of(cls, value: Any) -> Packed:
        """``value`` is data that pickle knows, and NumPy arrays, which are copied once. Raises the errors of pickle."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return cls(value, pickled, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])

    @property
    def nbytes(self) -> int:
        """The room that it needs in a row."""
        sizes = [len(self.pickled), 8 * len(self.arrays), *(each.size for each in self.arrays)]
        return _aligned(HEAD_BYTES) + sum(map(_aligned, sizes))


class RankCopies:
    """Copies of a value of each member of ``process_set``, for one world.

    They lie in memory that the ranks of one host share, in two turns. A copy stays as it is as long as any rank has the
    result of :meth:`keep`: the next one goes to the other turn, or to new memory. So one copy is whole at any time. The
    memory outlives each rank but the last. Where ranks are on several hosts, each rank gets the values of all ranks
    instead; ``is_shared`` is False from the first copy on.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._name = name
        self._number = 0
        self._rows: Sequence[Sequence[Bytes]] = ()
        self._kept: list[weakref.ref[_Shared] | None] = [None, None]
        self.is_shared = True

    @property
    def first_call(self) -> tuple[Operation, str]:
        """The collective by which :meth:`keep` begins."""
        return Operation.ALLGATHER, f"{self._name}.begin"

    def keep(self, packed: Packed) -> Kept:
        """Copy the value of this rank. A collective.

        The copy is whole on all ranks when it returns on one of them. Raises HorovodInternalError when a rank is lost
        or has joined.
        """
        turn = self._agree(packed.nbytes)
        if not self.is_shared:
            values = allgather_object(packed.value, f"{self._name}.values", self._process_set)
            self._require_all(len(values))
            return _Gathered(values)
        rows = self._rows[turn]
        _write(rows[self._process_set.rank() or 0], self._number, packed.pickled, packed.arrays)
        allgather_object(None, f"{self._name}.written", self._process_set)
        kept = _Shared(rows, self._number)
        self._kept[turn] = weakref.ref(kept)
        return kept

    def _agree(self, nbytes: int) -> int:
        """The turn that no rank needs any more, with room for the ``nbytes`` of this rank."""
        rank = self._process_set.rank() or 0
        has_room = bool(self._rows) and nbytes <= self._rows[0][rank].size
        used = [turn for turn, kept in enumerate(self._kept) if kept is not None and kept() is not None]
        own = np.array([[nbytes, has_room, 0 in used, 1 in used, self._number]], np.int64)
        told = run(Operation.ALLGATHER, gathered, own, self.first_call[1], self._process_set)
        self._require_all(len(told))
        self._number = int(told[:, 4].max()) + 1
        free = [turn for turn in (0, 1) if not told[:, 2 + turn].any()]
        if self.is_shared and not (free and told[:, 1].all()):
            self._allocate(told[:, 0].tolist())
            return 0
        return free[0] if free else 0

    def _require_all(self, count: int) -> None:
        if count != self._process_set.size():
            raise HorovodInternalError(
                f"{self._name}: a rank has called join(), so no copy has its part; let all ranks step equally often"
            )

    def _allocate(self, sizes: Sequence[int]) -> None:
        bounds = [0, *np.cumsum([_aligned(size) for size in sizes]).tolist()]
        shared, problem = shared_memory(2 * bounds[-1], f"{self._name}.memory", self._process_set)
        if shared is None:
            self.is_shared = False
            logger.warning(
                "%s: each commit sends the parts of all ranks, %d bytes, to each of them, because they share no "
                "memory: %s. Commit less often, or leave out sharded",
                self._name,
                sum(sizes),
                problem,
            )
            return
        turns = np.split(shared.memory, 2)
        self._rows = [[turn[a:b] for a, b in pairwise(bounds)] for turn in turns]
        self._kept = [None, None]


class _Gathered(NamedTuple):
    """A copy of which each rank has all values."""

    all_values: list[Any]

    def values(self) -> list[Any]:
        return self.all_values


class _Shared:
    """The copy with this ``number`` in the ``rows`` of one turn, one for each rank."""

    def __init__(self, rows: Sequence[Bytes], number: int) -> None:
        self._rows, self._number = rows, number

    def values(self) -> list[Any]:
        return [_read(row, self._number) for row in self._rows]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write(row: Bytes, number: int, pickled: bytes, arrays: Sequence[Bytes]) -> None:
    head = row[:HEAD_BYTES].view(np.int64)
    head[:] = -1, len(pickled), len(arrays)
    sizes = np.array([each.size for each in arrays], np.int64).view(np.uint8)
    start = _aligned(HEAD_BYTES)
    for each in (np.frombuffer(pickled, np.uint8), sizes, *arrays):
        row[start : start + each.size] = each
        start += _aligned(each.size)
    head[0] = number


def _read(row: Bytes, number: int) -> Any:
    found, length, count = row[:HEAD_BYTES].view(np.int64).tolist()
    if found != number:
        raise RuntimeError(f"copy {number} of a rank's values is not there; its place has copy {found}")
    start = _aligned(HEAD_BYTES)
    pickled = row[start : start + length].tobytes()
    start += _aligned(length)
    sizes = row[start : start + 8 * count].view(np.int64).tolist()
    starts = np.cumsum([start + _aligned(8 * count), *map(_aligned, sizes)]).tolist()
    arrays = [row[at : at + size] for at, size in zip(starts, sizes, strict=False)]
    return pickle.loads(pickled, buffers=arrays)
