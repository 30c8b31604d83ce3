"""The last step of a start: the backends of all ranks connect, and each rank learns that all have.

The handshake of some backends succeeds although the other process is stopped: the kernel answers for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from collectives.api import CollectiveTimeoutError, EngineError, HorovodInternalError, PeerLostError
from collectives.attempt import ConnectAttempt
from collectives.control.sockets import SocketChannel
from collectives.planning.errors import pack, unpack
from collectives.planning.messages import COORDINATOR, Abort, Accusation, Connected, Message, Ping, Pong, decode, encode
from collectives.planning.roll_call import GRACE_SECONDS, RollCall, verdict

__all__ = ["Confirmation"]

POLL_SECONDS = 0.01
REASON_SECONDS = 0.1
"""How long a rank that lost another waits for a better explanation."""
VERDICT_SECONDS = 2 * GRACE_SECONDS
"""Rank 0 has given its verdict within this time, unless it is stopped itself."""
VARIABLE = "HOROVOD_GLOO_TIMEOUT_SECONDS"


class Confirmation:
    """One rank's messages about the start, over ``channel``, until the engine uses that. ``hosts`` are those of ranks.

    Every rank answers the roll call of rank 0 while its backends connect. So the error of a rank that waited too long
    names the ranks that are stopped. For one thread.
    """

    def __init__(self, channel: SocketChannel, hosts: Sequence[str]) -> None:
        self._channel = channel
        self._hosts = hosts
        self._is_coordinator = channel.rank == COORDINATOR
        self._peers = tuple(range(1, channel.size)) if self._is_coordinator else (COORDINATOR,)
        self._awaited = set(self._peers)
        self._roll_call = RollCall(self._peers)
        self._verdict: HorovodInternalError | None = None

    def check(self) -> None:
        """Hear the other ranks, without a wait; raises the error that ends the start on all ranks."""
        arrivals = self._channel.receive()
        while arrivals and (self._awaited or self._is_coordinator):
            sender, data = arrivals.pop(0)
            self._hear(sender, decode(data))
        if arrivals:
            self._channel.put_back(arrivals)  # rank 0 runs its engine already
        self._look(time.monotonic())
        if self._verdict is not None:
            raise self._verdict

    def _hear(self, sender: int, message: Message) -> None:
        if isinstance(message, Connected):
            self._awaited.discard(sender)
        elif isinstance(message, Ping):
            self._channel.send_directly((COORDINATOR,), encode(Pong()))
        elif isinstance(message, Pong):
            self._roll_call.answered(sender, time.monotonic())
        elif isinstance(message, Accusation):
            self._accuse(unpack(message.error))
        elif isinstance(message, Abort):
            self._verdict = unpack(message.error)
        else:
            raise EngineError(f"{type(message).__name__} arrived while the backends connected")

    def confirm(self, attempt: ConnectAttempt) -> None:
        """The backends of this rank are connected: return when those of all ranks are.

        Raises CollectiveTimeoutError, the error of ``attempt``, and those of :meth:`check`.
        """
        if not self._is_coordinator:
            self._channel.send_to(self._peers, encode(Connected()))
        while self._awaited:
            attempt.check()
            if attempt.is_over:
                raise self._late()
            self._channel.poll(POLL_SECONDS)
            self.check()
        if self._is_coordinator:
            self._channel.send_to(self._peers, encode(Connected()))

    def _late(self) -> CollectiveTimeoutError:
        ranks = sorted(self._awaited)
        return CollectiveTimeoutError(f"ranks {ranks} did not report in time that their backends are connected", ranks)

    # Errors.

    def explain(self, error: BaseException, losses: Sequence[PeerLostError]) -> BaseException:
        """The best explanation of ``error``: the reason of another rank, a lost rank, or the verdict of rank 0."""
        if self._verdict is not None or not isinstance(error, PeerLostError | CollectiveTimeoutError):
            return self._verdict or error
        is_late = isinstance(error, CollectiveTimeoutError)
        if is_late:
            self._accuse(error)
        reason = self._reason(VERDICT_SECONDS if is_late else REASON_SECONDS, losses)
        if reason is None and is_late:
            return verdict(error, (COORDINATOR,), VERDICT_SECONDS, self._hosts, VARIABLE)
        return reason or error

    def _reason(self, seconds: float, losses: Sequence[PeerLostError]) -> HorovodInternalError | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.check()
            except HorovodInternalError as reason:
                return reason
            if losses:
                return losses[0]
            self._channel.poll(POLL_SECONDS)
        return None

    def _accuse(self, error: HorovodInternalError) -> None:
        """A rank gives up; rank 0 asks all ranks whether they run."""
        if self._is_coordinator:
            self._channel.send_directly(self._roll_call.accuse(error, time.monotonic()), encode(Ping()))
        else:
            self._channel.send_directly((COORDINATOR,), encode(Accusation(pack(error))))

    def _look(self, now: float) -> None:
        result = self._roll_call.settle(now) if self._roll_call else None
        if result is not None and result.accusation is not None:
            self._verdict = verdict(result.accusation, result.silent, result.seconds, self._hosts, VARIABLE)

    def abort(self, error: HorovodInternalError) -> None:
        """End the start with ``error`` on all ranks that this one can reach, also those whose relay is stopped."""
        message = encode(Abort(pack(error)))
        self._channel.send_to(self._peers, message)
        self._channel.send_directly([rank for rank in self._peers if rank in self._channel.relayed], message)
        self._channel.skip_relays()
