"""The relay between rank 0 and the ranks of another host. It runs in the process of the lowest one, the leader.

The relay has its own thread, so that no message waits while the leader's engine is inside a backend.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Iterable, Mapping

from collectives.api import EngineError, PeerLostError
from collectives.control import envelope
from collectives.control.sockets import FLUSH_SECONDS, Connection, wait
from collectives.planning.aggregation import Aggregator, Upward
from collectives.planning.errors import pack, unpack
from collectives.planning.messages import Abort, decode, encode

__all__ = ["Relay"]

logger = logging.getLogger(__name__)

HOLD_SECONDS = 1.0
"""How long an id waits for the other ranks of the host before the coordinator gets it and its senders, in seconds."""


class Relay:
    """Carries messages between ``center``, the connection to rank 0, and ``ranks``, one connection for each.

    Runs until the leader's own connection ends, which its channel closes; then sends what it still has, and hangs up.
    """

    def __init__(
        self, leader: int, center: Connection, ranks: Mapping[int, Connection], aggregator: Aggregator
    ) -> None:
        self._leader = leader
        self._center = center
        self._ranks = dict(ranks)
        self._aggregator = aggregator
        self._held_until: float | None = None
        self._open = {connection.fileno(): connection for connection in (center, *ranks.values())}
        self._senders = {connection.fileno(): rank for rank, connection in ranks.items()}
        self._poller = select.poll()
        for descriptor in self._open:
            self._poller.register(descriptor, select.POLLIN)
        # Owned by the channel of the leader; sleeps in poll, without limit unless ids are held; ended by the channel's
        # hang-up, joined by its close().
        self._thread = threading.Thread(target=self._run, name=f"hvd-relay-{leader}", daemon=True)
        self._thread.start()

    def join(self, deadline: float) -> None:
        """Wait until the relay has ended, after the leader's channel hung up, or until ``deadline``."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Close the connections."""
        for connection in (self._center, *self._ranks.values()):
            connection.close()

    def _run(self) -> None:
        try:
            while not self._ranks[self._leader].ended:
                self._step()
        except Exception as error:
            logger.exception("the relay in the process of rank %d: unexpected error", self._leader)
            self._fail(error)
        finally:
            self._hang_up()

    def _step(self) -> None:
        for descriptor in wait(self._poller, self._open.values(), self._until_due()):
            if descriptor in self._senders:
                self._pass_up(self._senders[descriptor])
            else:
                self._pass_down()
        for connection in self._open.values():
            connection.flush()

    def _until_due(self) -> float | None:
        """The time to wait for messages, in seconds; None: no limit. Sends up the ids that were held for too long."""
        now = time.monotonic()
        if self._held_until is not None and now >= self._held_until:
            self._tell(self._aggregator.flush())
        if not self._aggregator.holds:
            self._held_until = None
        elif self._held_until is None:
            self._held_until = now + HOLD_SECONDS
        return None if self._held_until is None else self._held_until - now

    def _pass_down(self) -> None:
        for frame in self._center.receive():
            ranks, data = envelope.unpack(frame)
            self._hand_out(ranks, data)
            self._tell(self._aggregator.down(decode(data)))
        if self._center.ended:
            self._forsake(self._center)
            self._ranks[self._leader].hang_up()  # only now, because the last message of rank 0 may explain its end

    def _pass_up(self, rank: int) -> None:
        for data in self._ranks[rank].receive():
            message = decode(data)
            if isinstance(message, Abort):  # this relay may be gone when rank 0 answers
                self._hand_out(self._ranks, data)
                self._report_loss(message)
            self._tell(self._aggregator.up(rank, message))
        if self._ranks[rank].ended:
            self._forsake(self._ranks[rank])

    def _report_loss(self, abort: Abort) -> None:
        """Let the leader notice that rank 0 is gone, even inside a backend, where it reads no messages.

        On the connection of this relay the kernel may notice that much later: a message that is sent after a partition
        begins restarts its timer. No message restarts the timer of a lifeline.
        """
        error = unpack(abort.error)
        if isinstance(error, PeerLostError) and 0 in error.ranks:
            self._ranks[self._leader].hang_up()

    def _hand_out(self, ranks: Iterable[int], data: bytes) -> None:
        for rank in ranks:
            self._ranks[rank].send(data)

    def _tell(self, messages: Iterable[Upward]) -> None:
        for rank, message in messages:
            self._center.send(envelope.pack((self._leader if rank is None else rank,), encode(message)))

    def _forsake(self, connection: Connection) -> None:
        """The other side has hung up; hang up, too, now that all its messages are on their way."""
        self._poller.unregister(connection.fileno())
        del self._open[connection.fileno()]
        connection.hang_up()

    def _fail(self, error: Exception) -> None:
        abort = Abort(pack(EngineError(f"the relay in the process of rank {self._leader} failed: {error}")))
        self._hand_out(self._ranks, encode(abort))
        self._tell([(self._leader, abort)])

    def _hang_up(self) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        for connection in self._open.values():
            connection.drain(deadline)
            connection.hang_up()
