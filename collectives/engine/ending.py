"""How the engine of one rank ends. Pure: no clock, no channel; the caller passes the time."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.api import HorovodInternalError, PeerLostError, ShutDownError, Topology
from collectives.planning.agreement import name_ranks
from collectives.planning.messages import Stop

__all__ = ["Ending"]


JOIN = (
    "a rank that has fewer batches than others must call hvd.join() after its last one. If it left fit() of Keras, "
    "which has no place for that, give all ranks the same steps_per_epoch, and let callbacks such as EarlyStopping "
    "decide alike on all ranks"
)


class Ending:
    """Runs until one of four ends: polite, abrupt, a lost rank, or a shutdown that timed out.

    Polite: :meth:`ask`, :meth:`leave`, :meth:`stop`, then :meth:`finish` when all ranks have left. Timed out: after
    :meth:`leave` not every rank answered within ``seconds``. Abrupt: :meth:`fail`. A lost rank is noted by
    :meth:`lose` and becomes an abrupt end, unless the engine ends anyway. ``finished`` turns true once; ``failure``
    then is the error of an abrupt end, None for the others. ``lost`` is the first rank that was lost.
    """

    def __init__(self, topology: Topology, seconds: float) -> None:
        self.finished = False
        self.failure: Exception | None = None
        self.lost: int | None = None
        self._topology = topology
        self._seconds = seconds
        self._has_ended = False
        self._asked: float | None = None
        self._deadline: float | None = None
        self._stopping = False
        self._refused = self._cause = ""
        self._stopped_by = topology.rank

    @property
    def deadline(self) -> float | None:
        """When :meth:`expire` finishes the end, in monotonic seconds; None before :meth:`leave`."""
        return self._deadline

    @property
    def is_leaving(self) -> bool:
        """Whether the polite end has begun here: no caller is expected to drive any more."""
        return self._deadline is not None

    @property
    def is_whole(self) -> bool:
        """Whether this rank knows of no lost rank, and the engine has not ended."""
        return self.lost is None and not self.finished

    def error(self) -> Exception:
        """The error of pending works, and of every later call."""
        if self.failure is not None:
            return self.failure
        ended = "Horovod has been shut down"
        if self._stopped_by != self._topology.rank:
            ended += f" by rank {self._stopped_by}{self._why()}"
        elif self._refused:
            ended += f"; before, {self._refused}"
        return ShutDownError(f"{ended}. Call hvd.init() to start again")

    def ask(self, now: float) -> None:
        """This rank wants to end politely."""
        self._asked = now

    def leave(self, now: float) -> None:
        """The wish to end goes out to the other ranks."""
        self._deadline = now + self._seconds

    def stop(self, message: Stop) -> ShutDownError:
        """The coordinator stops the job; returns the error of works still in flight."""
        self._stopping = True
        self._stopped_by = message.rank
        self._cause = message.cause
        self._refused = message.refused[0].text if message.refused else ""
        return ShutDownError(
            f"Horovod has been shut down by rank {message.rank} while the tensor was in flight{self._why()}"
        )

    def _why(self) -> str:
        """The cause, a call that a rank has refused and others have still to make, or else the likeliest one."""
        return f": it {self._cause}" if self._cause else f"; {self._refused or JOIN}"

    def finish(self) -> None:
        """Only the close is left to do."""
        self.finished = True

    def expire(self, now: float) -> bool:
        """Finish a polite end that takes too long; returns whether it did."""
        if self.finished or self._deadline is None or now <= self._deadline:
            return False
        self.finished = True
        return True

    def overdue(self, now: float, absent: Sequence[int]) -> ShutDownError | None:
        """The error of an abrupt end, if this rank asked for the end long ago and has not been able to leave.

        It has not, because the ranks ``absent``, or others if there are none, have not reached an operation.
        """
        if self._asked is None or now <= self._asked + self._seconds:
            return None
        late = name_ranks(absent) if absent else "another rank"
        return ShutDownError(f"Horovod has been shut down by rank {self._topology.rank}; {self.unanswered(late)}")

    def unanswered(self, ranks: str) -> str:
        """Says that ``ranks`` did not answer the shutdown, for a message."""
        return f"{ranks} did not answer the shutdown within {self._seconds:g} s"

    def fail(self, error: HorovodInternalError) -> bool:
        """Begin an abrupt end: the caller fails all works, then calls :meth:`finish`; False if already finished."""
        if self.finished:
            return False
        self.failure = error
        return True

    def lose(self, rank: int, has_ended: bool = False) -> PeerLostError | None:
        """The connection to ``rank`` ended or, if it ``has_ended``, its process.

        Returns the error for calls of backends, None if the loss was expected.
        """
        if self.lost is None:
            self.lost, self._has_ended = rank, has_ended
        return None if self._stopping or self.finished else self.loss(rank)

    def loss(self, rank: int) -> PeerLostError:
        """The error for the loss of ``rank``."""
        has_ended = self._has_ended and rank == self.lost
        reason = "its process ended" if has_ended else "its process ended or its connection broke"
        host = self._topology.hosts[rank]
        text = f"rank {rank} on host {host!r} is gone: {reason}; look at the output of that rank"
        return PeerLostError(text, [rank], [host], has_ended)
