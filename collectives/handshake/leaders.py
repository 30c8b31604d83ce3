"""The leader's part in the start of a large world: it admits the ranks of its host, and speaks for them with rank 0.

Frames of a follower go up unchanged, in the envelopes of :mod:`collectives.net.relay`; so does the news of its end.
Answers of rank 0 go down to all followers, with a proof for each. So rank 0 alone decides, as it does without leaders.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from typing import Any

from collectives.api import HorovodInternalError, SettingsError, override
from collectives.handshake.admission import Admission
from collectives.handshake.dial import Callee, pack_reason
from collectives.handshake.entries import Entries
from collectives.handshake.hello import LocalEnd, Peer, pack_answer, pack_farewell, pack_hello
from collectives.net.frames import fingerprint
from collectives.net.relay import GONE, pack_envelope
from collectives.net.sockets import Connection
from collectives.net.wire import Wire

PARTING_SECONDS = 0.5
"""How long a leader that fails waits until its followers have taken the reason, in seconds."""


class Forwarder(Admission):
    """Admits the other ranks of this host, whoever comes: rank 0 knows whether all have. A context manager.

    ``connections`` are those to the followers. It never waits for one of them.
    """

    def __init__(self, end: LocalEnd) -> None:
        others = frozenset(range(1, end.hello.size)) - {end.hello.rank}
        super().__init__(end, others, count=end.local_size)
        self.connections: dict[int, Connection] = {}
        self._said: list[bytes] = []
        self._center: Callee | None = None

    def publish(self, entries: Entries, center: str) -> None:
        """The other ranks of this host find this one in the store, if they know the listener ``center`` of rank 0."""
        entries.publish_leader(center, self.entry | {"rank": self._end.hello.rank})

    def attach(self, center: Callee) -> None:
        """Say what the followers have said to ``center``, rank 0, which has this rank's hello."""
        self._center = center
        for frame in self._said:
            center.send(frame)

    def serve(self, center: Callee) -> None:
        """Admit followers and forward what they say, until rank 0 has said something, or the time is over."""
        attempt = self._end.attempt
        self._poller.register(center.sock, select.POLLIN | select.POLLRDHUP)
        self._candidates.make_room()
        while not (attempt.is_over or center.has_answer):
            ready = attempt.poll(self._poller, self._candidates.next_look())
            for descriptor in ready:
                if descriptor != center.sock.fileno():
                    self._attend(descriptor)
            self._candidates.make_room()
        self._poller.unregister(center.sock)

    def tell(self, content: bytes) -> None:
        """Send an answer of rank 0 to the followers. The relay sends what a slow one has not taken by then."""
        self._send_all(content)
        for rank in self.connections:
            self._listen_to(rank)

    def _send_all(self, content: bytes) -> None:
        digest = fingerprint(content)
        for rank, connection in self.connections.items():
            connection.send(self._peers[rank].proof(digest) + content)

    def _register(self, peer: Peer) -> None:
        rank = peer.hello.rank
        self.connections[rank] = Connection(peer.wire.sock)
        self._listen_to(rank)
        self._forward(rank, pack_hello(peer.hello, b"", ""))

    def _listen_to(self, rank: int) -> None:
        unsent = select.POLLOUT if self.connections[rank].unsent else 0
        self._poller.register(self.connections[rank].fileno(), select.POLLIN | select.POLLRDHUP | unsent)

    def _heed(self, rank: int) -> None:
        """A follower has sent a frame, has ended, or can take more of the unsent bytes."""
        self.connections[rank].flush()
        self._listen_to(rank)
        try:
            frame = self._peers[rank].wire.read()
        except (OSError, HorovodInternalError):
            self._poller.unregister(self.connections[rank].fileno())
            frame = GONE
        if frame is not None:
            self._forward(rank, frame)

    def _forward(self, rank: int, data: bytes) -> None:
        frame = pack_envelope((rank,), data)
        self._said.append(frame)
        if self._center is not None:
            self._center.send(frame)

    @override
    def dismiss(self, error: BaseException) -> None:
        deadline = time.monotonic() + PARTING_SECONDS
        self._send_all(pack_answer(None, error))
        while self.connections:
            _, connection = self.connections.popitem()
            connection.drain(deadline)
            connection.close()


class Superior(Callee):
    """Rank 0, as a leader sees it: all that it says is for the followers of ``forwarder``, too."""

    def __init__(self, forwarder: Forwarder, end: LocalEnd, host: int, wire: Wire) -> None:
        super().__init__(end, host, wire)
        self._forwarder = forwarder

    def _send_hello(self, entry: Mapping[str, Any]) -> None:
        super()._send_hello(entry)
        self._forwarder.attach(self)

    def _next(self) -> Any:
        with self.hearing_errors(_farewell):
            self._forwarder.serve(self)
        return super()._next()

    def _content(self) -> bytes:
        content = super()._content()
        self._forwarder.tell(content)
        return content

    def _leave(self, reason: bytes) -> None:
        """In an envelope: rank 0 may have the channel of a relay by now."""
        super()._leave(pack_envelope((self._end.hello.rank,), reason))


def _farewell(error: BaseException) -> bytes:
    """As of a rank that gives up; a mistake of the launcher, which ends the start before it is over, stays one."""
    return pack_reason(error) if isinstance(error, SettingsError) else pack_farewell(error)
