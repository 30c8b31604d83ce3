"""The relay between rank 0 and the ranks of another host. It runs in the process of the lowest one, the leader.

The relay has its own thread, so that no message waits while the leader's engine is inside a backend.

Messages go through the relay, so that rank 0 talks to hosts. The end of a process is detected more directly: each rank
keeps its own connection to rank 0, its *lifeline*. Both ends watch it. So the kernel reports to rank 0 which process
died or fell silent, and to each rank the same about rank 0, regardless of the state of the relay. The lifeline carries
messages only where a rank waits for so long that the process of the relay may be stopped; the watch threads read them.

A closing channel hangs up towards the relay first, and on the lifelines when the relay has hung up in answer: then all
messages are on their way. So a rank that sent the reason for its end is not reported dead before the reason arrives.
A reason that went over the lifelines, too, needs no such wait: it arrives before their end.

In a large world only the leaders have lifelines: the other ranks of a host, its *followers*, are connected with their
leader only. There the relay *speaks* for both sides, in the order of their messages: it tells rank 0 which follower has
ended, and the followers that rank 0 has. Where a question of a follower goes up, the relay says that it runs itself. So
the follower knows whether its leader or rank 0 is silent.
"""

from __future__ import annotations

import logging
import select
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from collectives.api import EngineError, PeerLostError, override
from collectives.controller.aggregation import Aggregator, Upward
from collectives.controller.errors import pack, unpack
from collectives.controller.messages import (
    Abort,
    Accusation,
    Inquiry,
    Pong,
    RankStatus,
    WaitReport,
    decode,
    encode,
)
from collectives.net.sockets import FLUSH_SECONDS, Connection, SocketChannel, wait

logger = logging.getLogger(__name__)


def pack_envelope(ranks: Sequence[int], data: bytes) -> bytes:
    """The number of ranks, the ranks (4 bytes each, big-endian), then ``data`` as it is."""
    return struct.pack(f">I{len(ranks)}I", len(ranks), *ranks) + data


def unpack_envelope(frame: bytes) -> tuple[tuple[int, ...], bytes]:
    """The opposite of :func:`pack_envelope`; EngineError for data that :func:`pack_envelope` did not make."""
    try:
        (count,) = struct.unpack_from(">I", frame)
        ranks = struct.unpack_from(f">{count}I", frame, 4)
    except struct.error as error:
        raise EngineError(f"an envelope of {len(frame)} bytes cannot be read: {error}") from None
    if not ranks:
        raise EngineError("an envelope names no rank")
    return ranks, frame[4 + 4 * count :]


GONE = b""
"""In the place of a message: the rank that would have sent it has ended."""
RUNS = b"\0"
"""In the place of a message to a follower: its relay runs, and passes its question on."""
QUESTIONS = Inquiry | Accusation | Pong | WaitReport | RankStatus
"""The messages that a rank sends directly."""
HOLD_SECONDS = 1.0
"""How long an id waits for the other ranks of the host before the coordinator gets it and its senders, in seconds."""


class Relay:
    """Carries messages between ``center``, the connection to rank 0, and ``ranks``, one connection for each.

    Runs until the leader's own connection ends, which its channel closes; then sends what it still has, and hangs up.
    ``speaks``: the other ranks have no lifelines.
    """

    def __init__(
        self,
        leader: int,
        center: Connection,
        ranks: Mapping[int, Connection],
        aggregator: Aggregator,
        speaks: bool = False,
    ) -> None:
        self._leader = leader
        self._followers = frozenset(rank for rank in ranks if speaks and rank != leader)
        self._center = center
        self._ranks = dict(ranks)
        self._aggregator = aggregator
        self._held_until: float | None = None
        self._open = {connection.fileno(): connection for connection in (center, *ranks.values())}
        self._senders = {connection.fileno(): rank for rank, connection in ranks.items()}
        self._poller = select.poll()
        for descriptor in self._open:
            self._poller.register(descriptor, select.POLLIN)
        # Owned by the channel of the leader; sleeps in poll, without limit unless tensors are held; ended by the
        # channel's hang-up, joined by its close().
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
        """The time to wait for messages, in seconds; None: no limit. Sends up what was held for too long."""
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
            ranks, data = unpack_envelope(frame)
            self._hand_out(ranks, data)
            self._tell(self._aggregator.down(decode(data)))
        if self._center.ended:
            self._forsake(self._center)
            self._hand_out(self._followers, GONE)
            self._ranks[self._leader].hang_up()  # only now, because the last message of rank 0 may explain its end

    def _pass_up(self, rank: int) -> None:
        for data in self._ranks[rank].receive():
            message = decode(data)
            if isinstance(message, Abort):  # this relay may be gone when rank 0 answers
                self._hand_out(self._ranks, data)
                self._report_loss(message)
            if rank in self._followers and isinstance(message, QUESTIONS):
                self._ranks[rank].send(RUNS)
            self._tell(self._aggregator.up(rank, message))
        if self._ranks[rank].ended:
            self._forsake(self._ranks[rank])
            if rank in self._followers:
                self._center.send(pack_envelope((rank,), GONE))

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
            self._center.send(pack_envelope((self._leader if rank is None else rank,), encode(message)))

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
        if self._center.ended:
            self._await(self._followers, deadline - FLUSH_SECONDS / 2)
        for connection in self._open.values():
            connection.drain(deadline)
            connection.hang_up()

    def _await(self, ranks: Collection[int], deadline: float) -> None:
        """Let ``ranks`` read that rank 0 has ended: those that only see a hang-up would take the leader for dead.

        They hang up then. The wait is over before the leader's channel closes all connections.
        """
        for rank in ranks:
            self._ranks[rank].drain(deadline)
        for rank in ranks:
            self._ranks[rank].await_hang_up(deadline)


def relays(hosts: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Pure: rank -> host becomes leader -> the ranks its relay serves, itself included.

    Rank 0's host needs none, nor does a single rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return {here[0]: tuple(here) for host, here in ranks.items() if host != hosts[0] and len(here) > 1}


class _WithLifelines(SocketChannel):
    """``relayed`` are the peers whose connections lead to a relay; ``lifelines`` go by the rank at the other end."""

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, Connection],
        relayed: Iterable[int],
        lifelines: Mapping[int, Connection],
    ) -> None:
        super().__init__(rank, size, connections)
        self._relays = [connections[peer] for peer in relayed]
        self._lifelines = dict(lifelines)

    @override
    def skip_relays(self) -> None:
        self._relays = []

    def _watched(self) -> dict[int, int]:
        return super()._watched() | {lifeline.fileno(): rank for rank, lifeline in self._lifelines.items()}

    @property
    @override
    def relayed(self) -> Collection[int]:
        return self._lifelines.keys()

    @override
    def send_directly(self, ranks: Iterable[int], data: bytes) -> None:
        for rank in ranks:
            if rank in self._lifelines:
                self._lifelines[rank].send(data)
            else:
                self.send(rank, data)

    def _hear_aside(self, rank: int) -> None:
        with suppress(EngineError):  # such data also ends the connection, which the watch reports
            self._aside.extend([(rank, data) for data in self._lifelines[rank].receive()])
            self.wake()

    def _part(self, deadline: float) -> None:
        for relay in self._relays:
            relay.await_hang_up(deadline)
        for lifeline in self._lifelines.values():
            lifeline.hang_up()

    def _release(self) -> None:
        super()._release()
        for lifeline in self._lifelines.values():
            lifeline.close()


class Center(_WithLifelines):
    """Rank 0's channel: ``served`` has the ranks (itself included) reached through their leader's connection.

    Those without one of ``lifelines`` are followers.
    """

    def __init__(
        self,
        size: int,
        connections: Mapping[int, Connection],
        served: Mapping[int, Sequence[int]],
        lifelines: Mapping[int, Connection],
    ) -> None:
        super().__init__(0, size, connections, served, lifelines)
        self._leaders = {rank: leader for leader, ranks in served.items() for rank in ranks}
        direct = connections.keys() | lifelines.keys()
        self._only_led = {rank: leader for rank, leader in self._leaders.items() if rank not in direct}

    @property
    @override
    def leaders(self) -> Mapping[int, int]:
        return self._only_led

    @override
    def send(self, rank: int, data: bytes) -> None:
        self.send_to((rank,), data)

    @override
    def send_to(self, ranks: Iterable[int], data: bytes) -> None:
        served: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            if rank in self._leaders:
                served[self._leaders[rank]].append(rank)
            else:
                self._connections[rank].send(data)
        for leader, some in served.items():
            self._connections[leader].send(pack_envelope(some, data))

    def _open(self, peer: int, frames: list[bytes]) -> list[tuple[int, bytes]]:
        if peer not in self._leaders:
            return super()._open(peer, frames)
        found = [(ranks[0], data) for ranks, data in map(unpack_envelope, frames)]
        for rank in [rank for rank, data in found if data == GONE]:
            self._lose(rank)
        return [(rank, data) for rank, data in found if data != GONE]


class Leaf(_WithLifelines):
    """For a rank that reaches rank 0 through the relay in the process of ``leader``, which is lost where that ends."""

    def __init__(self, rank: int, size: int, leader: int, connection: Connection, lifeline: Connection) -> None:
        super().__init__(rank, size, {leader: connection}, (leader,), {0: lifeline})
        self._relay = connection

    @override
    def send(self, rank: int, data: bytes) -> None:
        self._relay.send(data)

    def _open(self, peer: int, frames: list[bytes]) -> list[tuple[int, bytes]]:
        return super()._open(0, frames)


class Follower(SocketChannel):
    """For a rank without a lifeline: it reaches rank 0 through the relay in the process of ``leader`` only."""

    def __init__(self, rank: int, size: int, leader: int, connection: Connection) -> None:
        super().__init__(rank, size, {leader: connection})
        self._leader = leader
        self._has_heard = True

    @property
    @override
    def silent_rank(self) -> int:
        return 0 if self._has_heard else self._leader

    @override
    def send(self, rank: int, data: bytes) -> None:
        self._connections[self._leader].send(data)

    @override
    def send_directly(self, ranks: Iterable[int], data: bytes) -> None:
        some = tuple(ranks)
        self._has_heard = self._has_heard and not some
        super().send_directly(some, data)

    def _open(self, peer: int, frames: list[bytes]) -> list[tuple[int, bytes]]:
        if RUNS in frames:
            self._has_heard = True
        if GONE in frames:
            self._lose(0)
        return [(0, data) for data in frames if data not in (GONE, RUNS)]


class Leader(SocketChannel):
    """For the rank whose process has the ``relay`` of its host, at the other end of ``connection``; owns the relay.

    The relay hangs up after rank 0 does, so this connection represents the one to rank 0.
    """

    def __init__(self, rank: int, size: int, connection: Connection, relay: Relay) -> None:
        super().__init__(rank, size, {0: connection})
        self._relay = relay

    def _part(self, deadline: float) -> None:
        self._relay.join(deadline)

    def _release(self) -> None:
        super()._release()
        self._relay.release()
