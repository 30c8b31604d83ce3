"""Memory for tensors that the ranks of a host combine again and again, such as gradients: in place, without a copy."""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
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

    :meth:`take` needs no other rank. After :meth:`connect` the engine combines tensors in place that lie at equal
    places on all ranks, as long as the world and this object last. When a world ends with an error, other ranks may
    still write into the tensors for a while. Child processes made by fork() see the same memory, and no copy of it.
    """

    def __init__(self) -> None:
        self._memory: Bytes | None = None
        self._taken = 0
        self._leave: object | None = None
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
        if token is not None:
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

    def connect(self, name: str, process_set: ProcessSet) -> bool:
        """Whether tensors are combined in place from now on. A collective called ``name`` on the ranks of one host."""
        self._leave = None
        row = ArenaRow(f"/proc/{os.getpid()}/fd/{self._descriptor}", self._token, self._taken) if self._taken else None
        rows = allgather_object(row, f"{name}.rows", process_set)
        memory = self._attached(rows, process_set.rank() or 0)
        problems = allgather_object(memory if isinstance(memory, str) else "", f"{name}.problems", process_set)
        if isinstance(memory, str) or any(problems):
            logger.debug("%s: tensors are not combined in place: %s", name, max(problems))
            return False
        key = next(row.token for row in rows if row)
        self._leave = basics.engine().share(memory, key, process_set.process_set_id or 0)
        return self._leave is not None

    def _attached(self, rows: Sequence[ArenaRow | None], own: int) -> list[Bytes] | str:
        """The memory of all members, or the reason why there is none."""
        taken = {row and row.nbytes for row in rows}
        if len(taken) > 1 or self._memory is None:
            return f"the ranks have taken different numbers of bytes: {taken}"
        try:
            return [self._memory[: self._taken] if at == own else row.attach() for at, row in enumerate(rows) if row]
        except (OSError, ValueError) as error:
            return f"rank {basics.rank()}: {error}"


def arena_for(process_set: ProcessSet) -> SharedArena | None:
    """A new one; None, on all members, where they are on several hosts or there is one only."""
    if not process_set.included() or process_set.size() == 1 or len(members_by_host(process_set)) > 1:
        return None
    return SharedArena()
