"""Copies of values that each rank has alone, kept where the others find them after that rank is lost."""

from __future__ import annotations

import logging
import pickle
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


class RankCopies:
    """The last two copies of a value of each member of ``process_set``, for one world.

    They lie in memory that the ranks of one host share: two turns, so that one of them is whole at any time. The memory
    outlives each rank but the last. Where ranks are on several hosts, each rank gets the values of all ranks instead;
    ``is_shared`` is False from the first copy on.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name = name
        self._process_set = process_set
        self._number = self._turn = 0
        self._rows: Sequence[Sequence[Bytes]] = ()
        self.is_shared = True

    def keep(self, value: Any, replaces: bool = False) -> Kept:
        """Copy the ``value`` of this rank: data that pickle knows, and NumPy arrays, which are copied once.

        A collective. The copy is whole on all ranks when it returns on one of them; the one before it is, until all
        ranks have called this again. ``replaces``: the copy takes the place of the last one, and the one before that
        stays. Raises HorovodInternalError when a rank is lost.
        """
        pickled, arrays = _packed(value)
        if self.is_shared:
            self._reserve(_size(pickled, arrays))
        if not self.is_shared:
            return _Gathered(allgather_object(value, f"{self._name}.values", self._process_set))
        self._number += 1
        self._turn ^= not replaces
        rows = self._rows[self._turn]
        _write(rows[self._process_set.rank() or 0], self._number, pickled, arrays)
        allgather_object(None, f"{self._name}.written", self._process_set)
        return _Shared(rows, self._number)

    def _reserve(self, nbytes: int) -> None:
        """Have room for the ``nbytes`` of this rank, and wait until no rank needs the copy before the last one."""
        own = np.array([[nbytes]], np.int64)
        sizes = run(Operation.ALLGATHER, gathered, own, f"{self._name}.sizes", self._process_set)[:, 0].tolist()
        if len(sizes) != self._process_set.size():
            raise HorovodInternalError(
                f"{self._name}: a rank has called join(), so no copy has its part; let all ranks step equally often"
            )
        if self._rows and all(size <= row.size for size, row in zip(sizes, self._rows[0], strict=True)):
            return
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


class _Gathered(NamedTuple):
    """A copy of which each rank has all values."""

    all_values: list[Any]

    def values(self) -> list[Any]:
        return self.all_values


class _Shared(NamedTuple):
    """The copy with this ``number`` in the ``rows`` of one turn, one for each rank."""

    rows: Sequence[Bytes]
    number: int

    def values(self) -> list[Any]:
        return [_read(row, self.number) for row in self.rows]


def _packed(value: Any) -> tuple[bytes, list[Bytes]]:
    """The pickle of ``value``, and the memory of the arrays in it."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickled, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _size(pickled: bytes, arrays: Sequence[Bytes]) -> int:
    return _aligned(HEAD_BYTES) + sum(map(_aligned, [len(pickled), 8 * len(arrays), *(each.size for each in arrays)]))


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
        raise HorovodInternalError(f"copy {number} of a rank's values is not there; its place has copy {found}")
    start = _aligned(HEAD_BYTES)
    pickled = row[start : start + length].tobytes()
    start += _aligned(length)
    sizes = row[start : start + 8 * count].view(np.int64).tolist()
    starts = np.cumsum([start + _aligned(8 * count), *map(_aligned, sizes)]).tolist()
    arrays = [row[at : at + size] for at, size in zip(starts, sizes, strict=False)]
    return pickle.loads(pickled, buffers=arrays)
