"""The interface of backends: collectives on one group of ranks over the memory of one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from collectives.api import CollectiveTimeoutError, EngineError, Parameters, ReduceOp, Topology
from collectives.backends.completion import Completion
from collectives.backends.memory import Memory
from collectives.backends.phases import OnPhase, Receiver, Span, time_phases
from collectives.buffers import Buffer, Bytes
from collectives.net.attempts import ConnectAttempt


@dataclass(frozen=True, slots=True)
class Group:
    """A list of ranks, as one of them sees it.

    ``ranks`` are the global ranks of the members; a member's index in it is its *position*, and ``position`` is that
    of this process. ``hosts[i]`` is the host of the member at position i. ``size`` is the number of members. Backends
    compute with positions; messages to users name global ranks and hosts, see :meth:`describe`.
    """

    ranks: tuple[int, ...]
    position: int
    hosts: tuple[str, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))

    @classmethod
    def of(cls, members: Sequence[int], topology: Topology) -> Group:
        """The group of the global ranks ``members``, which include the rank of this process."""
        ranks = tuple(members)
        return cls(ranks, ranks.index(topology.rank), tuple(topology.hosts[rank] for rank in ranks))

    @property
    def others(self) -> list[int]:
        """The positions of the other members."""
        return [position for position in range(self.size) if position != self.position]

    def ranks_at(self, positions: Iterable[int]) -> list[int]:
        """The global ranks of the members at ``positions``."""
        return [self.ranks[position] for position in positions]

    def some_others(self) -> str:
        """The other members, for a message about one of them that is not known."""
        return ("" if self.size < 3 else "at least one of ") + self.describe(self.others)

    def late(self, what: str) -> CollectiveTimeoutError:
        """The error for other members that did not do ``what`` in time; it names all, as nobody knows which one."""
        return CollectiveTimeoutError(f"{self.some_others()} {what}", self.ranks_at(self.others))

    def part(self, positions: Sequence[int]) -> Group:
        """The group of the members at ``positions``, which include that of this process."""
        ranks = tuple(self.ranks_at(positions))
        hosts = tuple(self.hosts[position] for position in positions)
        return Group(ranks, tuple(positions).index(self.position), hosts)

    def by_host(self) -> list[list[int]]:
        """The positions on each host; the hosts in the order of their first members."""
        found: dict[str, list[int]] = {}
        for position, host in enumerate(self.hosts):
            found.setdefault(host, []).append(position)
        return list(found.values())

    def describe(self, positions: Iterable[int]) -> str:
        """The members at ``positions`` for a message: "rank 3 on host 'b'", "ranks 0, 1 on host 'a' and ..."."""
        found = list(positions)
        hosts: dict[str, list[int]] = {}
        for position in found[:MOST_NAMED]:
            hosts.setdefault(self.hosts[position], []).append(self.ranks[position])
        named = [f"{_name(ranks)} on host {host!r}" for host, ranks in hosts.items()]
        more = [f"{len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
        return " and ".join(named + more)


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


MOST_NAMED = 64
"""The members that a message names at most: each rank of a large world may send such a message to rank 0."""

MOST_LINKED = 64
"""The members of a TCP group at most each of which is connected to all others, and votes with all of them."""


def is_large(size: int) -> bool:
    """Whether a TCP group of ``size`` members is: a member is connected to some of the others only."""
    return size > MOST_LINKED


Call: TypeAlias = Callable[[], None]

OnMissing: TypeAlias = Callable[[list[int]], None]
"""Called with the positions of the members that a vote still waits for."""


class Vote(ABC):
    """The members decide, round by round, whether to run an operation.

    Every member takes part in every round, once: it attempts an operation or declines. For one thread at a time.
    """

    @abstractmethod
    def attempt(self, value: int, call: Call, waiting: OnMissing, agreed: Call) -> bool:
        """Run ``call``, an operation on all members, if all members attempt ``value``; return whether they do.

        ``value`` has 32 bits and is not 0. ``agreed`` is called as soon as all members have attempted ``value``, at
        the latest before anything is written to a destination. A disagreement is known as soon as one member
        declines or attempts another value, even if others have not entered the round; then no destination has been
        written. Where one member counts the votes of others, it is known only once that one has entered the round or
        declined. Until either is known, ``waiting`` is called every few milliseconds with the positions of the members
        that have not entered the round. Where only the late hosts are known, the first member gets all of their
        members, and others may get none. After a round without an operation, nobody enters the next one before all
        have left this one. Errors of these calls and of the operation propagate.
        """

    @abstractmethod
    def decline(self) -> None:
        """Take part in the next round with nothing to run. Does not wait."""

    def hurry(self) -> None:
        """Another member has waited for long in a round that this one has left. Does not wait."""
        return


class OffersVote(ABC):
    """Something that gives its members a vote, such as a backend in shared memory. The vote ends with it."""

    @abstractmethod
    def vote(self) -> Vote | None:
        """The vote of these members; None, on all of them, if they have none."""


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

    def share(self, rows: Sequence[Bytes], key: bytes) -> object | None:
        """Combine tensors that lie in ``rows[position]`` in place, as long as the caller keeps the result. Any thread.

        All members read and write the memory of ``rows``, one for each of them, of equal lengths. ``key`` is the same
        random number on all members, at most 64 bytes. An allreduce works in place if its sources are its destinations,
        and lie at the same places of the row on all members. None where the backend has no use for it.
        """
        return None

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


class Bootstrap(ABC):
    """One member that is about to connect to the others of ``group``.

    ``offer`` is the address for the others: bytes that only this class reads.
    """

    def __init__(self, group: Group, offer: bytes = b"") -> None:
        self.group = group
        self.offer = offer

    @abstractmethod
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> Backend:
        """The connected backend; ``offers`` are those of the members, by position. Call it once.

        Raises PeerLostError, CollectiveTimeoutError, and the error that ``attempt`` was aborted with.
        """

    def close(self) -> None:
        """Release the offered address, if it is one of this member, after :meth:`connect` or instead. Idempotent."""
        return
