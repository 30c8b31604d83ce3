"""The base of backends for host memory: buffers -> NumPy arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import DType, ReduceOp, override
from collectives.backends.base import Backend, Group
from collectives.backends.completion import DONE, Completion
from collectives.backends.memory import HostMemory
from collectives.buffers import Buffer, host_arrays, host_bytes
from collectives.kernels.reduction import ReductionKernel, reduction

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class HostBackend(Backend):
    """Operations that are over when the call returns, on flat contiguous arrays.

    Reductions get arrays in ``DType.storage`` layout, movements get bytes. ``rank`` is the position of this member in
    the group, not its global rank. :class:`Backend` describes the arguments.
    """

    device = "cpu"
    memory = HostMemory()

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.rank = group.position
        self.size = group.size

    @override
    def allreduce(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        inputs, outputs = host_arrays(sources), host_arrays(destinations)
        self.allreduce_arrays(inputs, outputs, reduction(sources[0].dtype, op, prescale, postscale))
        return DONE

    @override
    def reducescatter(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        inputs, outputs = host_arrays(sources), host_arrays(destinations)
        self.reducescatter_arrays(inputs, outputs, counts, reduction(sources[0].dtype, op, prescale, postscale))
        return DONE

    @override
    def allgather(self, sources: Sequence[Buffer], destinations: Sequence[Buffer], counts: Sequence[int]) -> Completion:
        inputs, outputs = host_bytes(sources), host_bytes(destinations)
        self.allgather_bytes(inputs, outputs, counts)
        return DONE

    @override
    def broadcast(self, source: Buffer, destination: Buffer, root: int) -> Completion:
        data = source.bytes
        self.broadcast_bytes(data, data if destination is source else destination.bytes, root)
        return DONE

    @override
    def alltoall(
        self, source: Buffer, destination: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Completion:
        data, total = source.bytes, sum(send_counts)
        if len(data) > total:
            data = data[:total]
        self.alltoall_bytes(data, destination.bytes, send_counts, receive_counts)
        return DONE

    @override
    def barrier(self) -> Completion:
        self.wait_for_all()
        return DONE

    @abstractmethod
    def allreduce_arrays(self, sources: Sequence[Array], destinations: Sequence[Array], how: ReductionKernel) -> None:
        """Do :meth:`Backend.allreduce` on arrays."""

    @abstractmethod
    def reducescatter_arrays(
        self, sources: Sequence[Array], destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        """Do :meth:`Backend.reducescatter` on arrays."""

    @abstractmethod
    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        """Do :meth:`Backend.allgather` on bytes."""

    @abstractmethod
    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        """Do :meth:`Backend.broadcast` on bytes."""

    @abstractmethod
    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """Do :meth:`Backend.alltoall` on bytes. ``source`` holds exactly the bytes to send."""

    @abstractmethod
    def wait_for_all(self) -> None:
        """Return when every member has called it."""


KEPT = 1 << 25
"""Bytes that a workspace keeps at most."""


class Workspace:
    """Grows when needed: fresh memory costs a page fault for each 4 KB. More than KEPT is not kept."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def take(self, count: int, dtype: DType) -> Array:
        """An array of ``count`` elements with any content. It replaces the one taken before."""
        nbytes = count * dtype.itemsize
        if nbytes > KEPT:
            return np.empty(count, dtype.storage)
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype.storage)
