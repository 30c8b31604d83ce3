"""Memory for tensors that the ranks of a host combine again and again, such as gradients: in place, without a copy."""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.host_memory import TOKEN_BYTES, members_by_host
from hvd_cluster.ops.objects import allgather_object

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 64
RESERVED_BYTES = 1 << 36
"""Of addresses; memory is taken for tensors only."""


class ArenaRow(NamedTuple):
    """Where a member has its memory, which begins with ``token``, and how much of it is in use."""

    path: str
    token: bytes
    nbytes: int

    def attach(self) -> Bytes:
        """The memory; OSError or ValueError where it cannot be found, as from another container."""
        with open(self.path, "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), self.nbytes), np.uint8)
        if memory[:TOKEN_BYTES].tobytes() != self.token:
            raise ValueError(f"the memory of another rank is not at {self.path}")
        return memory


class SharedArena:
    """Memory of this rank, in which tensors stay as long as they live. For one thread.

    :meth:`take` needs no other rank. After :func:`combine_in_place` the engine combines tensors in place that lie at
    equal places on all ranks. When a world has ended with an error, a rank that was stopped in the middle may write
    into the tensors as long as its process lives. A child made by fork() sees the same memory, and no copy of it.
    """

    def __init__(self) -> None:
        self._memory: Bytes | None = None
        self._taken = 0
        self._sharing: dict[int, object | None] = {}
        try:
            self._reserve()
        except (OSError, ValueError) as error:
            logger.debug("there is no shared memory for tensors: %s", error)

    def _reserve(self) -> None:
        self._descriptor = os.memfd_create("hvd-cluster-arena", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, RESERVED_BYTES)
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, RESERVED_BYTES), np.uint8)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        token = self.take([TOKEN_BYTES], np.uint8)
        if token is None:
            self._memory = None
        else:
            token[:] = np.frombuffer(self._token, np.uint8)

    def __deepcopy__(self, memo: object) -> SharedArena:
        return self

    def take(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
        """Zeros for a tensor, whose views keep the memory; None where there is none left."""
        kind = np.dtype(dtype)
        start, nbytes = self._taken + -self._taken % ALIGNMENT, math.prod(shape) * kind.itemsize
        if self._memory is None or not nbytes:
            return None
        try:
            os.posix_fallocate(self._descriptor, start, nbytes)  # now: a lack of memory would later end the process
        except OSError as error:
            logger.debug("there is no shared memory for a tensor of %d bytes: %s", nbytes, error)
            return None
        self._taken = start + nbytes
        return self._memory[start : self._taken].view(kind).reshape(shape)

    def row(self) -> ArenaRow | None:
        """The place of the memory, for the other members; None where there is none."""
        return ArenaRow(f"/proc/{os.getpid()}/fd/{self._descriptor}", self._token, self._taken) if self._taken else None

    def attached(self, rows: Sequence[ArenaRow], own: int) -> list[Bytes]:
        """The memory of all members; OSError or ValueError where it cannot be found, or they have taken other sizes."""
        taken = {row.nbytes for row in rows}
        if self._memory is None or taken != {self._taken}:
            raise ValueError(f"the ranks have taken different numbers of bytes: {sorted(taken)}")
        return [self._memory[: self._taken] if at == own else row.attach() for at, row in enumerate(rows)]

    def share(self, memory: Sequence[Bytes] | None, rows: Sequence[ArenaRow], process_set: ProcessSet) -> bool:
        """Whether the engine combines tensors of this arena in place from now on; None ends it."""
        number = process_set.process_set_id or 0
        self._sharing[number] = None
        if memory is not None:
            key = blake2b(b"".join(row.token for row in rows)).digest()  # arenas of other members have another one
            self._sharing[number] = basics.engine().share(memory, key, number)
        return self._sharing[number] is not None


def can_share(process_set: ProcessSet) -> bool:
    """Whether there are several members, all on one host; the same on all members in one world."""
    return bool(process_set.included()) and (process_set.size() or 1) > 1 and len(members_by_host(process_set)) == 1


def combine_in_place(arena: SharedArena | None, name: str, process_set: ProcessSet) -> bool:
    """Whether tensors of ``arena`` are combined in place from now on, as long as this world and the arena last.

    Where ranks :func:`can_share`, a collective called ``name``, also on those without an arena. They must have taken
    the same memory.
    """
    if not can_share(process_set):
        return False
    told: list[ArenaRow | None] = allgather_object(arena.row() if arena else None, f"{name}.rows", process_set)
    rows = [row for row in told if row is not None]
    memory, problem = None, "a rank has no shared memory, or has joined"
    if arena is not None and len(rows) == process_set.size():
        try:
            memory, problem = arena.attached(rows, process_set.rank() or 0), ""
        except (OSError, ValueError) as error:
            problem = f"rank {basics.rank()}: {error}"
    problems = list(filter(None, allgather_object(problem, f"{name}.problems", process_set)))
    if problems:
        logger.debug("%s: tensors are not combined in place: %s", name, problems[0])
    return arena is not None and arena.share(None if problems else memory, rows, process_set)
