"""The interface of backends: collectives on one group of ranks over the memory of one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

from collectives.api import EngineError, ReduceOp
from collectives.backends.group import Group
from collectives.backends.memory import Memory
from collectives.backends.phases import OnPhase, Receiver, Span, time_phases
from collectives.buffers import Buffer
from collectives.completion import Completion
from collectives.parameters import Parameters

__all__ = ["Backend", "OnDeath", "OnWait", "ignore_waits"]

OnWait: TypeAlias = Callable[[], None]
"""Called at least ten times a second on a thread that waits for another member inside an operation. It does not raise:
an end of the engine aborts the backends instead."""

OnDeath: TypeAlias = Callable[[int], None]
"""Called with the rank of a member whose process has certainly ended, on a thread of the backend's own."""


def ignore_waits() -> None:
    """The receiver of waits of a backend that has no other."""
    return


class Backend(ABC):
    """Collectives among the members of ``group`` over memory of the kind ``device``.

    All members call the same operations in the same order with matching arguments: negotiation guarantees it. Calls
    come from one thread at a time. An operation may return before it is over: the caller keeps the memory of the
    buffers alive, does not change sources and does not read destinations until the completion is done. Operations of
    one backend take effect in the order of the calls.

    Lists hold at least one buffer, all of one dtype; buffers may be empty. Source and destination may be the same
    memory, and never overlap partly. Reductions get no complex numbers: the engine passes pairs of reals. ``op`` is
    AVERAGE for integers only, see :mod:`collectives.kernels.reduction`: the average of floats is SUM with a
    ``postscale``. 16-bit floats are accumulated in float32, but NCCL rounds a sum once for each member. The result of a
    reduction is bit-identical on all members.

    Any call, and any completion, raises PeerLostError, CollectiveTimeoutError or, after :meth:`abort`, the error that
    abort was given; then the group is unusable.
    """

    name: str
    on_phase: OnPhase | None = None
    """The receiver of phases, see :meth:`observe`."""
    device: ClassVar[str]
    """The kind of memory: "cpu" or "cuda", as in :class:`collectives.buffers.Buffer`."""
    memory: Memory
    absence: str = ""
    """Why this backend cannot be used; empty where it can."""
    closes_aside: bool = False
    """Whether this process may connect in its next world while another thread is in :meth:`close`."""
    settles_early: bool = False
    """Whether the caller need not wait for the end of an operation that has begun: its streams do, see
    :meth:`Completion.precede`."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._receiver = Receiver(_forget)
        self._is_in_profile = False

    @abstractmethod
    def allreduce(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        """destination = postscale * reduce(op, prescale * source) for a list of buffers, fused into one exchange.

        ``sources[i]`` and ``destinations[i]`` have equal lengths. Integers are scaled in float64 and truncated
        towards zero.
        """

    @abstractmethod
    def reducescatter(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        """Reduce sum(counts) elements and keep the ``counts[position]`` elements that belong to this member.

        The sources, seen as one vector, hold the elements of member 0 first; the result is spread over the
        destinations.
        """

    @abstractmethod
    def allgather(self, sources: Sequence[Buffer], destinations: Sequence[Buffer], counts: Sequence[int]) -> Completion:
        """Concatenate the bytes of all members, in their order; ``counts[i]`` bytes come from member i, 0 allowed.

        The sources, seen as one vector, are the bytes of this member; they may be its own part of the result. The
        result is spread over the destinations.
        """

    @abstractmethod
    def broadcast(self, source: Buffer, destination: Buffer, root: int) -> Completion:
        """Copy the ``source`` of the member at position ``root`` to every member's ``destination``.

        Sources elsewhere are not read.
        """

    @abstractmethod
    def alltoall(
        self, source: Buffer, destination: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Completion:
        """Send ``send_counts[i]`` consecutive bytes to each member i; receive ``receive_counts[i]`` from each.

        ``source`` may be longer than the bytes to send.
        """

    @abstractmethod
    def barrier(self) -> Completion:
        """Done when every member has called it."""

    def begin_after(self, ready: Completion) -> None:
        """Let the operations that are called from now on begin after ``ready``. Does not block.

        The engine calls it before an operation on memory that is still in use, see :attr:`Buffer.ready`. Host memory
        never is.
        """
        raise EngineError(f"backend {self.name} was given memory of {self.device} that is still in use")

    def observe(self, on_phase: OnPhase | None, in_profile: bool = False) -> None:
        """Report the phases of the operations that begin from now on to ``on_phase``; None ends that.

        It is called on any thread, when a phase is over. With ``in_profile`` the phases are ranges of the profile, too.
        Without ``on_phase``, phases have no cost.
        """
        self._receiver.take = on_phase or _forget
        if ((on_phase is None), in_profile) != ((self.on_phase is None), self._is_in_profile):
            for owner in self.phased():
                time_phases(owner, None if on_phase is None else self._receiver, in_profile)
        self.on_phase, self._is_in_profile = on_phase, in_profile

    def phased(self) -> Sequence[object]:
        """The objects that have methods marked with :func:`collectives.backends.phases.phase`."""
        return (self,)

    def attend(self, on_wait: OnWait) -> None:
        """Call ``on_wait`` while an operation waits for another member for long. Other waits have no cost."""
        return

    def waited(self) -> tuple[float, float]:
        """How long this member has waited for others since the last call, in seconds, as far as the backend can tell.

        First the waits until all had begun an operation, then those inside of operations. The next wait is one of the
        first kind. Called from the thread that runs the operations.
        """
        return 0.0, 0.0

    def watch(self, on_death: OnDeath) -> None:
        """Report the deaths of members that this backend notices before their connections end, until :meth:`close`."""
        return

    def adopt(self, parameters: Parameters) -> None:
        """Use ``parameters`` from the next operation on; all members are called between the same two operations."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release everything, when all operations are over; all members close. Idempotent.

        Called from the thread that runs the operations.
        """

    @abstractmethod
    def abort(self, error: Exception) -> None:
        """Make every present and future call on this member raise ``error``, within 0.1 s. Safe from any thread.

        So do completions, once the device no longer uses the memory of their operations.
        """


def _forget(span: Span) -> None:
    """The receiver of the spans that end when there are no observers any more."""
