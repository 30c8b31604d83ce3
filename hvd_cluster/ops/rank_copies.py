"""Copies of values that each rank has alone, kept where other ranks find them after that rank is lost."""

from __future__ import annotations

import logging
import pickle
import secrets
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from collectives import HorovodInternalError, InvalidRequestError, Operation
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.arrays import gathered
from hvd_cluster.ops.host_memory import host_memory, members_by_host
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ops.submission import run

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 64
HEAD_BYTES = 32
"""Before a value: the number of its copy, the bytes of the row, those of its pickle, and the number of its arrays."""


class CopyId(NamedTuple):
    """The copy with a ``number``, from 1 on, of the copies with a random ``family``; it has a row for each member."""

    family: int
    number: int
    size: int


class RowId(NamedTuple):
    """The row in ``copy`` of the member at ``position``."""

    copy: CopyId
    position: int


class Kept(Protocol):
    """One copy of the values of all ranks."""

    id: CopyId

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the rows of all ranks."""

    def add(self, rows: Mapping[int, Bytes]) -> None:
        """Take the rows of other ranks, by position."""

    def values(self) -> list[Any]:
        """Those of all ranks in their order, in memory that may be overwritten later.

        InvalidRequestError unless the copy is whole.
        """


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


class RowPlaces(NamedTuple):
    """Pure: where rows lie. ``groups`` are the members of each host; ``redundancy`` more hosts get each row.

    Those are the next ones in the order of the groups, and on each the member with the same place gets the row.
    """

    groups: Sequence[Sequence[int]]
    redundancy: int

    def receivers(self, position: int) -> list[int]:
        """The members to which that at ``position`` sends its row."""
        number, index = self._group(position)
        others = [self.groups[(number + step) % len(self.groups)] for step in range(1, self.redundancy + 1)]
        return sorted(group[index % len(group)] for group in others)

    def senders(self, position: int) -> list[int]:
        """The members that send their row to that at ``position``."""
        members = sorted(member for group in self.groups for member in group)
        return [member for member in members if position in self.receivers(member)]

    def on_host(self, position: int) -> list[int]:
        """The members whose rows lie on the host of that at ``position``."""
        number, _ = self._group(position)
        groups = [self.groups[(number - step) % len(self.groups)] for step in range(self.redundancy + 1)]
        return sorted(member for group in groups for member in group)

    def _group(self, position: int) -> tuple[int, int]:
        return next((number, each.index(position)) for number, each in enumerate(self.groups) if position in each)


class RankCopies:
    """Copies of a value of each member of ``process_set``, for one world.

    Each value is a row in memory that the ranks of a host share, in two turns. A copy stays as it is as long as any
    rank has the result of :meth:`keep`: the next one goes to the other turn, or to new memory. So one copy is whole at
    any time. The memory outlives each rank of its host but the last.

    ``redundancy``: on how many other hosts each row lies, too; None for all of them. Where the ranks of a host cannot
    share memory, each has its own row and those that it gets; None then lets each rank have all rows.
    """

    def __init__(self, name: str, process_set: ProcessSet, redundancy: int | None = None) -> None:
        self._process_set = process_set
        self._name = name
        self._redundancy = redundancy
        self._family = self._number = 0
        self._places = RowPlaces(list(members_by_host(process_set).values()), 0)
        self._sizes: Sequence[int] = ()
        self._turns: Sequence[Mapping[int, Bytes]] = ()
        self._kept: list[weakref.ref[_Copy] | None] = [None, None]
        self._copies: weakref.WeakSet[_Copy] = weakref.WeakSet()

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks share the memory; before the first copy, whether they are on one host."""
        return len(self._places.groups) == 1

    @property
    def first_call(self) -> tuple[Operation, str]:
        """The collective by which :meth:`keep` begins."""
        return Operation.ALLGATHER, f"{self._name}.begin"

    def keep(self, packed: Packed) -> Kept:
        """Copy the value of this rank. A collective.

        The copy is there on all ranks when it returns on one of them. Raises HorovodInternalError when a rank is lost
        or has joined.
        """
        turn = self._agree(packed.nbytes)
        rows = self._turns[turn]
        _write(rows[self._position], self._number, packed)
        if self._places.redundancy:
            self._send(rows)
        allgather_object(None, f"{self._name}.written", self._process_set)
        kept = _Copy(CopyId(self._family, self._number, len(self._sizes)), rows)
        self._kept[turn] = weakref.ref(kept)
        self._copies.add(kept)
        return kept

    def rows(self) -> dict[RowId, Bytes]:
        """Those that this rank has now: of both turns, and of copies in earlier memory that are still needed."""
        memories = [*self._turns, *(copy.rows for copy in self._copies)]
        return {
            RowId(CopyId(self._family, number, len(self._sizes)), position): row[:nbytes]
            for rows in memories
            for position, row in rows.items()
            for number, nbytes in [_head(row)[:2]]
            if number > 0
        }

    @property
    def _position(self) -> int:
        return self._process_set.rank() or 0

    def _agree(self, nbytes: int) -> int:
        """The turn that no rank needs any more, with room for the ``nbytes`` of this rank."""
        has_room = bool(self._turns) and nbytes <= self._turns[0][self._position].size
        used = [turn for turn, kept in enumerate(self._kept) if kept is not None and kept() is not None]
        own = np.array(
            [[nbytes, has_room, 0 in used, 1 in used, self._number, self._family or 1 + secrets.randbits(62)]], np.int64
        )
        told = run(Operation.ALLGATHER, gathered, own, self.first_call[1], self._process_set)
        self._require_all(len(told), self._process_set.size() or 1)
        self._number, self._family = int(told[:, 4].max()) + 1, int(told[0, 5])
        self._sizes = told[:, 0].tolist()
        free = [turn for turn in (0, 1) if not told[:, 2 + turn].any()]
        if not (free and told[:, 1].all()):
            self._allocate()
            return 0
        return free[0]

    def _require_all(self, found: int, expected: int) -> None:
        if found != expected:
            raise HorovodInternalError(
                f"{self._name}: a rank has called join(), so no copy has its part; let all ranks step equally often"
            )

    def _allocate(self) -> None:
        hosts = list(members_by_host(self._process_set).values())
        places = RowPlaces(hosts, self._copies_of(len(hosts)))
        kept = places.on_host(self._position)
        shared, problem = host_memory(2 * self._room(kept), f"{self._name}.memory", self._process_set)
        if shared is None:
            if self._redundancy is None or len(hosts) == 1:
                hosts = [[member] for group in hosts for member in group]
                places = RowPlaces(hosts, self._copies_of(len(hosts)))
            kept = sorted([self._position, *places.senders(self._position)])
        memory = np.zeros(2 * self._room(kept), np.uint8) if shared is None else shared.memory
        self._places, self._kept = places, [None, None]
        bounds = [0, *accumulate(_aligned(self._sizes[member]) for member in kept)]
        self._turns = [
            {member: turn[start:stop] for member, (start, stop) in zip(kept, pairwise(bounds), strict=True)}
            for turn in np.split(memory, 2)
        ]
        self._tell(problem)

    def _copies_of(self, hosts: int) -> int:
        return hosts - 1 if self._redundancy is None else min(self._redundancy, hosts - 1)

    def _room(self, members: Sequence[int]) -> int:
        return sum(_aligned(self._sizes[member]) for member in members)

    def _tell(self, problem: str) -> None:
        groups, count = self._places
        if len(groups) > 1 and not count:
            logger.warning(
                "%s: redundancy=0 keeps no copy on a second host, so the loss of a host would lose its part of %d "
                "bytes, and end the job; give redundancy=1",
                self._name,
                sum(self._sizes),
            )
        elif count:
            logger.info(
                "%s: each commit sends the part of each rank to %d others, %d bytes in all. %s",
                self._name,
                count,
                count * sum(self._sizes),
                problem,
            )

    def _send(self, rows: Mapping[int, Bytes]) -> None:
        position, size = self._position, len(self._sizes)
        receivers, senders = self._places.receivers(position), self._places.senders(position)
        own = rows[position][: self._sizes[position]]
        splits = tuple(own.size if member in receivers else 0 for member in range(size))
        source = own if len(receivers) == 1 else np.tile(own, len(receivers))
        name = f"{self._name}.between"
        received = run(Operation.ALLTOALL, gathered, source, name, self._process_set, splits=splits)
        sizes = [self._sizes[member] for member in senders]
        self._require_all(received.size, sum(sizes))
        for member, (start, stop) in zip(senders, pairwise([0, *accumulate(sizes)]), strict=True):
            _copy_row(rows[member], received[start:stop])


class _Copy:
    """The copy ``id``, of which this rank has ``rows`` by position."""

    def __init__(self, id: CopyId, rows: Mapping[int, Bytes]) -> None:
        self.id = id
        self.rows = dict(rows)

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == self.id.size

    def add(self, rows: Mapping[int, Bytes]) -> None:
        self.rows = {**rows, **self.rows}

    def values(self) -> list[Any]:
        if not self.is_whole:
            raise InvalidRequestError(
                "the state of the sharded optimizer lies in parts on several hosts, so this rank cannot go back to its "
                "last commit alone; call sync() of the elastic state on all ranks"
            )
        return [_read(self.rows[position], self.id.number) for position in range(self.id.size)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _head(row: Bytes) -> list[int]:
    head: list[int] = row[:HEAD_BYTES].view(np.int64).tolist()
    return head


def _write(row: Bytes, number: int, packed: Packed) -> None:
    head = row[:HEAD_BYTES].view(np.int64)
    head[:] = -1, packed.nbytes, len(packed.pickled), len(packed.arrays)
    sizes = np.array([each.size for each in packed.arrays], np.int64).view(np.uint8)
    start = _aligned(HEAD_BYTES)
    for each in (np.frombuffer(packed.pickled, np.uint8), sizes, *packed.arrays):
        row[start : start + each.size] = each
        start += _aligned(each.size)
    head[0] = number


def _copy_row(row: Bytes, source: Bytes) -> None:
    """The number comes last: a process may end at any point of this."""
    row[:8] = 0xFF
    row[8 : source.size] = source[8:]
    row[:8] = source[:8]


def _read(row: Bytes, number: int) -> Any:
    found, _, length, count = _head(row)
    if found != number:
        raise RuntimeError(f"copy {number} of a rank's values is not there; its place has copy {found}")
    start = _aligned(HEAD_BYTES)
    pickled = row[start : start + length].tobytes()
    start += _aligned(length)
    sizes = row[start : start + 8 * count].view(np.int64).tolist()
    starts = np.cumsum([start + _aligned(8 * count), *map(_aligned, sizes)]).tolist()
    arrays = [row[at : at + size] for at, size in zip(starts, sizes, strict=False)]
    return pickle.loads(pickled, buffers=arrays)
