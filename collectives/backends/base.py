"""What a backend is: collectives on one group of ranks over the memory of one device kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from collectives.api import DType, ReduceOp
from collectives.backends.group import Group
from collectives.parameters import Parameters

__all__ = ["Array", "Backend", "Board", "Bytes"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Board(ABC):
    """How the members of a group decide by themselves, round by round, whether to run an operation.

    Every member comes to every round, once: it attempts an operation or declines. For one thread at a time.
    """

    @abstractmethod
    def attempt(
        self,
        value: int,
        call: Callable[[], None],
        waiting: Callable[[list[int]], None],
        agreed: Callable[[], None],
    ) -> bool:
        """Run ``call``, an operation of the backend, if all members attempt ``value`` (32 bits, not 0); whether so.

        ``agreed`` is called as soon as that is known, at the latest before anything is written to a destination. That
        it is not so is known as soon as one member comes with something else, even if others have not come; then no
        destination has been written. Every few milliseconds until either is known, ``waiting`` is called with the
        members that have not come. Raises what these calls raise, and what the backend was aborted with.
        """

    @abstractmethod
    def decline(self) -> None:
        """Come to the next round with nothing to run. Does not wait."""


class Backend(ABC):
    """Collectives among the members of ``group``. ``rank`` is the position of this member in it, not its global rank.

    All members call the same operations in the same order with matching arguments: negotiation guarantees it. Calls
    come from one thread at a time. Arrays are one-dimensional, contiguous, in host memory; reductions get arrays in
    ``DType.storage`` layout, movements get bytes. Lists hold at least one array; arrays may be empty. Source and
    destination may be the same memory, never overlap partly. ``op`` is AVERAGE for integers only, see
    :mod:`collectives.kernels.reduction`: that of floats is SUM with a ``postscale``. 16-bit floats are accumulated in
    float32. The result of a reduction is bit-identical on all members. Any call raises PeerLostError,
    CollectiveTimeoutError or, after :meth:`abort`, the error that abort was given; then the group is unusable.
    """

    name: ClassVar[str]
    board: Board | None = None
    """Where the members have one; it ends with the backend."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.position
        self.size = group.size

    @abstractmethod
    def allreduce(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """destination = postscale * reduce(op, prescale * source) for a list of arrays, fused into one exchange.

        ``sources[i]`` and ``destinations[i]`` have equal lengths. Integers are scaled in float64 and truncated
        towards zero.
        """

    @abstractmethod
    def reducescatter(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        counts: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Reduce sum(counts) elements and keep the ``counts[rank]`` elements that belong to this rank.

        The sources, seen as one vector, hold what belongs to rank 0 first; the result is spread over the destinations.
        """

    @abstractmethod
    def allgather(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        """Concatenate what the members have, in rank order; ``counts[r]`` bytes come from rank r, 0 allowed.

        The sources, seen as one vector, are what this rank has; they may be its own part of the result, which is spread
        over the destinations.
        """

    @abstractmethod
    def broadcast(self, source: Bytes, destination: Bytes, root: int) -> None:
        """Copy the root's ``source`` to every member's ``destination``; sources elsewhere are not read."""

    @abstractmethod
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """Send ``send_counts[r]`` consecutive bytes to each rank r; receive ``receive_counts[r]`` from each."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every member has called it."""

    def adopt(self, parameters: Parameters) -> None:
        """Use ``parameters`` from the next operation on; all members are told so between the same two operations."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release everything, politely; all members close. Idempotent. Called from the communication thread."""

    @abstractmethod
    def abort(self, error: Exception) -> None:
        """Make every present and future call on this member raise ``error``, within 0.5 s. Safe from any thread."""
