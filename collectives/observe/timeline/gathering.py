"""The sink of rank 0 of several: writes its records and those that the other ranks send into one document."""

from __future__ import annotations

import logging
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgpack

from collectives.api import LONGEST_SECONDS, HorovodInternalError, SettingsError, ShutDownError
from collectives.handshake.hello import Peer
from collectives.handshake.listeners import MOST_CANDIDATES, Candidates, Listeners
from collectives.net.attempts import ConnectAttempt
from collectives.net.sockets import Connection
from collectives.observe.timeline.address import END, PING, RECORDS, TimelineAddress, unpack_records
from collectives.observe.timeline.document import Document
from collectives.observe.timeline.records import Record
from collectives.observe.timeline.timeline import give_way

logger = logging.getLogger(__name__)

MOST_WAITING = 1 << 25
"""While more characters than these wait for the document, nothing is read from the other ranks: they drop events."""
PAUSE_SECONDS = 0.02
CLOSE_SECONDS = 1.0
"""How long rank 0 waits for the last records of the other ranks."""
TIME = struct.Struct(">d")


class Gathering:
    """Owns ``document``. Times are those of the clock of this rank. For the thread of the timeline."""

    def __init__(self, document: Document, rendezvous: TimelineAddress) -> None:
        self._document = document
        self._rendezvous = rendezvous
        self._origin = document.origin
        self.shift = -self._origin
        self.ended = False
        self.is_ready = True
        self._waiting = _Waiting()
        self._receiver = _Receiver(rendezvous, self._origin, self._waiting)

    def write(self, records: list[Record]) -> None:
        self._document.write(records)
        self._document.write(self._waiting.take())

    def close(self) -> None:
        try:
            self._receiver.close()
            self.write([])
        finally:
            self._document.close()

    def disown(self) -> None:
        self._document.disown()
        self._receiver.disown()


class _Waiting:
    """Records that the receiver puts in, and the thread of the timeline takes out."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque()
        self._put = self._taken = 0  # characters; one thread writes each

    @property
    def characters(self) -> int:
        """The length of all texts."""
        return self._put - self._taken

    def put(self, records: Sequence[Record]) -> None:
        """Append ``records``."""
        self._put += _length(records)
        self.records.extend(records)

    def take(self) -> list[Record]:
        """All records that have come."""
        taken = [self.records.popleft() for _ in range(len(self.records))]
        self._taken += _length(taken)
        return taken


def _length(records: Sequence[Record]) -> int:
    return sum([len(record.text) for record in records])


class _Receiver:
    """Admits the other ranks and puts their records into ``waiting``. Runs until :meth:`close`."""

    def __init__(self, rendezvous: TimelineAddress, origin: float, waiting: _Waiting) -> None:
        self._rendezvous = rendezvous
        self._origin = origin
        self._waiting = waiting
        self._connections: dict[int, Connection] = {}
        self._admitted: set[int] = set()
        self._attempt = ConnectAttempt(LONGEST_SECONDS)
        self._end = rendezvous.end(self._attempt)
        self._poller = select.poll()
        size = self._end.hello.size
        self._listeners = Listeners(self._end.hello, self._end.address, size + MOST_CANDIDATES)
        self._candidates = Candidates(self._end, self._listeners, self._poller, size - 1, self._admit)
        self._closing = False
        # Owned by the receiver; aborted and joined by close(), which takes CLOSE_SECONDS at most.
        self._thread = threading.Thread(target=self._run, name="hvd-timeline-in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take what the ranks still send, for CLOSE_SECONDS at most, and end."""
        self._closing = True
        self._attempt.abort(ShutDownError("the timeline ends"))
        self._thread.join(CLOSE_SECONDS * 2)

    def disown(self) -> None:
        """In a forked child: close the copies of the sockets."""
        self._listeners.__exit__(None, None, None)
        self._candidates.close()
        for connection in list(self._connections.values()):
            connection.close()

    def _admit(self, peer: Peer) -> None:
        sock = peer.wire.sock
        if peer.hello.rank in self._admitted:
            sock.close()  # without a refusal: it wants the next recording, and calls until this one is over
            return
        try:
            with ConnectAttempt(CLOSE_SECONDS) as peer.wire.attempt:
                peer.answer(self._origin)
        except BaseException:
            sock.close()
            raise
        self._admitted.add(peer.hello.rank)
        self._connections[sock.fileno()] = Connection(sock)
        self._poller.register(sock, select.POLLIN)

    # On its thread.

    def _run(self) -> None:
        give_way()
        try:
            with self._listeners:
                try:
                    self._receive()
                finally:
                    self._candidates.close()
            self._receive_rest()
        except (HorovodInternalError, SettingsError, OSError) as error:
            logger.warning("the timeline has no records of other ranks: %s", error)
        finally:
            for connection in self._connections.values():
                connection.close()
            self._attempt.close()

    def _receive(self) -> None:
        with self._rendezvous.store() as store:
            store.set(self._rendezvous.key, msgpack.packb(self._listeners.entry))
        with suppress(ShutDownError):
            while True:
                self._pause_if_full()
                self._candidates.make_room()
                for descriptor in self._attempt.poll(self._poller, self._candidates.next_look()):
                    self._attend(descriptor)

    def _pause_if_full(self) -> None:
        while self._waiting.characters > MOST_WAITING:
            self._attempt.wait({}, PAUSE_SECONDS)

    def _attend(self, descriptor: int) -> None:
        connection = self._connections.get(descriptor)
        if connection is None:
            self._candidates.attend(descriptor)
        else:
            self._hear(descriptor, connection)

    def _hear(self, descriptor: int, connection: Connection) -> None:
        try:
            for frame in connection.receive():
                self._handle(connection, frame)
        except (HorovodInternalError, ValueError, TypeError) as error:
            logger.warning("the timeline lacks a rank: %s", error)
            connection.ended = True
        if connection.ended:
            self._poller.unregister(descriptor)
            self._connections.pop(descriptor).close()

    def _handle(self, connection: Connection, frame: bytes) -> None:
        if frame.startswith(PING):
            connection.send(frame + TIME.pack(time.monotonic()))
        elif frame.startswith(RECORDS):
            self._waiting.put(unpack_records(frame))

    def _receive_rest(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        for connection in self._connections.values():
            connection.send(END)
        with ConnectAttempt(CLOSE_SECONDS) as attempt:
            while self._connections and time.monotonic() < deadline:
                events = dict.fromkeys(self._connections, select.POLLIN)
                for descriptor in attempt.wait(events):
                    self._hear(descriptor, self._connections[descriptor])
