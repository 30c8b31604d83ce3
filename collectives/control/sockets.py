"""The channel among processes: stream sockets, Unix within a host and TCP between hosts, authenticated by the secret.

Each rank other than 0 keeps one connection to rank 0. A frame is a length (4 bytes, big-endian) and that many bytes.
Linux only: abstract Unix sockets, eventfd, POLLRDHUP.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from collectives.control.base import Channel

__all__ = ["Connection", "SocketChannel"]

HEADER = struct.Struct(">I")
READ_SIZE = 1 << 16
HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
FLUSH_SECONDS = 2.0


class Connection:
    """One framed, non-blocking connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._unread = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether :meth:`flush` has something to do."""
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Send a frame, or keep what the kernel does not take for :meth:`flush`. A dead peer is not reported here."""
        frame = HEADER.pack(len(data)) + data
        if self._unsent:
            self._unsent += frame
        else:
            self._unsent += frame[self._try_send(frame) :]

    def flush(self) -> None:
        """Send what was kept, as far as the kernel takes it."""
        while self._unsent:
            sent = self._try_send(self._unsent)
            if not sent:
                return
            del self._unsent[:sent]

    def _try_send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the watch reports the loss

    def receive(self) -> list[bytes]:
        """The complete frames that have arrived."""
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return []
        except OSError:
            return []  # the watch reports the loss
        self._unread += data
        while len(data) == READ_SIZE:
            data = self._read_more()
            self._unread += data
        return self._frames()

    def _read_more(self) -> bytes:
        try:
            return self._socket.recv(READ_SIZE)
        except OSError:
            return b""

    def _frames(self) -> list[bytes]:
        frames = []
        start = 0
        while len(self._unread) >= start + HEADER.size:
            (length,) = HEADER.unpack_from(self._unread, start)
            stop = start + HEADER.size + length
            if len(self._unread) < stop:
                break
            frames.append(bytes(self._unread[start + HEADER.size : stop]))
            start = stop
        del self._unread[:start]
        return frames

    def hang_up(self) -> None:
        """Tell the peer's watch that this end is done; what was sent still arrives."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise

    def close(self) -> None:
        """Release the descriptor."""
        self._socket.close()


class SocketChannel(Channel):
    """Control messages over ``connections`` (peer rank -> connection); owns them from now on."""

    def __init__(self, rank: int, size: int, connections: Mapping[int, Connection]) -> None:
        super().__init__(rank, size)
        self._connections = dict(connections)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watcher: threading.Thread | None = None
        self._closed = False
        # Who is about to write to _wake: keeps wake() off a descriptor that close() has given back. No lock, because a
        # signal handler may call wake() while its thread is in it.
        self._waking: set[object] = set()
        # Two pollers may wait at once, the driver and the communication thread; a poll object admits one each.
        self._pollers = threading.local()

    @property
    def has_unsent(self) -> bool:
        """See :class:`Channel`."""
        return any(connection.has_unsent for connection in self._connections.values())

    def flush(self, timeout: float) -> None:
        """See :class:`Channel`."""
        deadline = time.monotonic() + timeout
        for connection in self._connections.values():
            self._flush(connection, deadline)

    def watch(self, on_lost: Callable[[int], None]) -> None:
        """See :class:`Channel`."""
        # Owned by the channel; sleeps in poll without limit, ended and joined by close() through the end event.
        self._watcher = threading.Thread(target=self._watch, args=(on_lost,), name="hvd-watch", daemon=True)
        self._watcher.start()

    def _watch(self, on_lost: Callable[[int], None]) -> None:
        poller = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for descriptor in ranks:
            poller.register(descriptor, HANG_UP)
        poller.register(self._end, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self._end:
                    return
                poller.unregister(descriptor)
                on_lost(ranks[descriptor])

    def send(self, rank: int, data: bytes) -> None:
        """See :class:`Channel`."""
        self._connections[rank].send(data)

    def receive(self) -> list[tuple[int, bytes]]:
        """See :class:`Channel`."""
        messages: list[tuple[int, bytes]] = []
        for rank, connection in self._connections.items():
            if connection.has_unsent:
                connection.flush()
            messages.extend((rank, data) for data in connection.receive())
        return messages

    def poll(self, timeout: float | None) -> None:
        """See :class:`Channel`."""
        poller = self._poller()
        unsent = [connection for connection in self._connections.values() if connection.has_unsent]
        for connection in unsent:
            poller.modify(connection.fileno(), select.POLLIN | select.POLLOUT)
        for descriptor, _ in poller.poll(None if timeout is None else max(timeout, 0.0) * 1000.0):
            if descriptor == self._wake:
                self._clear_wake()
        for connection in unsent:
            poller.modify(connection.fileno(), select.POLLIN)

    def _poller(self) -> select.poll:
        poller: select.poll | None = getattr(self._pollers, "poller", None)
        if poller is None:
            poller = self._pollers.poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            for connection in self._connections.values():
                poller.register(connection.fileno(), select.POLLIN)
        return poller

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):  # the other poller was faster
            os.eventfd_read(self._wake)

    def wake(self) -> None:
        """See :class:`Channel`."""
        token = object()
        self._waking.add(token)
        try:
            if not self._closed:
                os.eventfd_write(self._wake, 1)
        finally:
            self._waking.discard(token)

    def close(self) -> None:
        """See :class:`Channel`."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + FLUSH_SECONDS
        for connection in self._connections.values():
            self._flush(connection, deadline)
            connection.hang_up()
        os.eventfd_write(self._end, 1)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(FLUSH_SECONDS)
        for connection in self._connections.values():
            connection.close()
        os.close(self._end)
        while self._waking and time.monotonic() < deadline + FLUSH_SECONDS:
            time.sleep(0.001)
        if not self._waking:  # whoever is there still was interrupted, and must not hit a foreign descriptor
            os.close(self._wake)

    def disown(self) -> None:
        """See :class:`Channel`."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()
        os.close(self._wake)
        os.close(self._end)

    def _flush(self, connection: Connection, deadline: float) -> None:
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLOUT)
        while connection.has_unsent and poller.poll(max(0.0, deadline - time.monotonic()) * 1000.0):
            connection.flush()
