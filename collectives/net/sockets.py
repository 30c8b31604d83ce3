"""The channel among processes: stream sockets, Unix within a host and TCP between hosts, authenticated by the secret.

Linux only: abstract Unix sockets, eventfd, POLLRDHUP, TCP_USER_TIMEOUT.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from collectives.api import EngineError, override
from collectives.net.channel import Channel
from collectives.net.frames import Frames, frame

CREDENTIALS = struct.Struct("iii")
"""Process, user and group; see unix(7)."""
LARGEST_FRAME = 1 << 28
"""In bytes; a thousand ranks' splits of a thousand rows each are a few megabytes."""
READ_SIZE = 1 << 16
HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
FLUSH_SECONDS = 2.0


def end_in_silence(sock: socket.socket, seconds: float) -> None:
    """Let the kernel end a TCP connection whose other host has been silent for ``seconds``; see tcp(7).

    Probes detect the silence while no data is under way, TCP_USER_TIMEOUT while some is. That needs no thread and no
    message of the engine. A busy or stopped peer is not silent: its kernel answers.
    """
    if sock.family == socket.AF_UNIX:
        return
    idle, interval = max(1, int(seconds / 2)), max(1, int(seconds / 6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, math.ceil((seconds - idle) / interval)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(seconds * 1000))


class Connection:
    """One framed, non-blocking connection. ``ended`` becomes true when :meth:`receive` reaches the end.

    ``unsent`` is the data that :meth:`flush` has to send.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ended = False
        self._socket = sock
        self._frames = Frames(LARGEST_FRAME)
        self.unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._socket.fileno()

    @property
    def process(self) -> int | None:
        """The id of the process at the other end, of this host; None if this is no connection within a host."""
        if self._socket.family != socket.AF_UNIX:
            return None
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return CREDENTIALS.unpack(credentials)[0] or None  # 0: a process of another namespace

    def send(self, data: bytes) -> None:
        """Send a frame; keep for :meth:`flush` what the kernel does not accept. A dead peer is not reported here."""
        whole = frame(data)
        if self.unsent:
            self.unsent += whole
        else:
            self.unsent += whole[self._try_send(whole) :]

    def flush(self) -> None:
        """Send the kept data, as far as the kernel accepts it."""
        while self.unsent:
            sent = self._try_send(self.unsent)
            if not sent:
                return
            del self.unsent[:sent]

    def _try_send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the watch reports the loss

    def drain(self, deadline: float) -> None:
        """Send the kept data; waits until the peer accepts it or until ``deadline``, in monotonic seconds."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLOUT)
        while self.unsent and poller.poll(max(0.0, deadline - time.monotonic()) * 1000.0):
            self.flush()

    def receive(self) -> list[bytes]:
        """The complete frames that have arrived; EngineError when the data cannot be valid frames."""
        data = self._read()
        if not data:
            return []
        try:
            frames = self._frames.feed(data)
            while len(data) == READ_SIZE:
                data = self._read()
                frames += self._frames.feed(data)
        except PermissionError as error:
            raise self._nonsense(error) from error
        return frames

    def _read(self) -> bytes:
        if self.ended:
            return b""
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""  # the watch reports the loss
        self.ended = not data
        return data

    def _nonsense(self, error: PermissionError) -> EngineError:
        """Stop reading; the reason can still be sent to the peer."""
        self.ended = True
        self._shut_down(socket.SHUT_RD)
        return EngineError(str(error))

    def hang_up(self) -> None:
        """Signal the peer's watch that this end is done; sent data still arrives."""
        self._shut_down(socket.SHUT_WR)

    def await_hang_up(self, deadline: float) -> None:
        """Wait until the peer has hung up, or ``deadline``, in monotonic seconds."""
        poller = select.poll()
        poller.register(self.fileno(), HANG_UP)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000.0)

    def _shut_down(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise

    def close(self) -> None:
        """Release the descriptor."""
        self._socket.close()


def wait(poller: select.poll, connections: Iterable[Connection], timeout: float | None) -> list[int]:
    """The descriptors of ``poller`` that are ready; returns, too, when ``connections`` can send the data they keep."""
    unsent = [connection for connection in connections if connection.unsent]
    for connection in unsent:
        poller.modify(connection.fileno(), select.POLLIN | select.POLLOUT)
    ready = poller.poll(None if timeout is None else max(timeout, 0.0) * 1000.0)
    for connection in unsent:
        poller.modify(connection.fileno(), select.POLLIN)
    return [descriptor for descriptor, _ in ready]


class SocketChannel(Channel):
    """Control messages over ``connections`` (peer rank -> connection); owns them from now on."""

    def __init__(self, rank: int, size: int, connections: Mapping[int, Connection]) -> None:
        super().__init__(rank, size)
        self._connections = dict(connections)
        self._peers = {connection.fileno(): peer for peer, connection in connections.items()}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watcher: threading.Thread | None = None
        self._on_lost: Callable[[int], None] = lambda rank: None
        self._lost: list[int] = []
        # Owned by the channel, held for a few instructions: each callback gets each rank once.
        self._watching = threading.Lock()
        self._closed = False
        # Filled by the watch thread and put_back(), emptied by receive().
        self._aside: deque[tuple[int, bytes]] = deque()
        # The calls that are about to write to _wake: keeps wake() off a descriptor that close() has released. No lock,
        # because a signal handler may call wake() while its thread is in it.
        self._waking: set[object] = set()
        # Two pollers may wait at once, the driver and the communication thread; a poll object allows only one.
        self._pollers = threading.local()

    @property
    @override
    def has_unsent(self) -> bool:
        for connection in self._connections.values():  # noqa: SIM110 - faster, and the engine asks after each operation
            if connection.unsent:
                return True
        return False

    @override
    def flush(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for connection in self._connections.values():
            connection.drain(deadline)

    @override
    def watch(self, on_lost: Callable[[int], None]) -> None:
        with self._watching:
            self._on_lost, lost = on_lost, list(self._lost)
        for rank in lost:
            on_lost(rank)
        if self._watcher is None:
            # Owned by the channel; sleeps in poll without limit, ended and joined by close() through the end event.
            self._watcher = threading.Thread(target=self._watch, name="hvd-watch", daemon=True)
            self._watcher.start()

    def _lose(self, rank: int) -> None:
        with self._watching:
            if rank in self._lost:  # the relay of a follower may tell what its leader has told before
                return
            self._lost.append(rank)
            on_lost = self._on_lost
        on_lost(rank)

    def _watch(self) -> None:
        poller = select.poll()
        ranks = self._watched()
        for descriptor in ranks:
            poller.register(descriptor, HANG_UP if descriptor in self._peers else HANG_UP | select.POLLIN)
        poller.register(self._end, select.POLLIN)
        while True:
            for descriptor, event in poller.poll():
                if descriptor == self._end:
                    return
                if event & select.POLLIN:
                    self._hear_aside(ranks[descriptor])
                if event & HANG_UP:
                    poller.unregister(descriptor)
                    self._lose(ranks[descriptor])

    def _hear_aside(self, rank: int) -> None:
        """On the watch thread: ``rank`` has sent something on a connection that :meth:`receive` does not read."""
        return

    def _watched(self) -> dict[int, int]:
        """Descriptors, and the rank that is lost when its connection ends."""
        return self._peers

    @override
    def process(self, rank: int) -> int | None:
        connection = self._connections.get(rank)
        return None if connection is None else connection.process

    @override
    def send(self, rank: int, data: bytes) -> None:
        self._connections[rank].send(data)

    @override
    def receive(self) -> list[tuple[int, bytes]]:
        messages: list[tuple[int, bytes]] = []
        while self._aside:
            messages.append(self._aside.popleft())
        for peer in self._talking():
            connection = self._connections[peer]
            if connection.unsent:
                connection.flush()
            try:
                frames = connection.receive()
                if frames:
                    messages += self._open(peer, frames)
            except EngineError as error:
                raise EngineError(
                    f"the connection from rank {peer} to rank {self.rank} is out of step: {error}"
                ) from error
        return messages

    def put_back(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Let the next :meth:`receive` return ``messages`` first, which the last one has returned."""
        self._aside.extendleft(reversed(messages))
        self.wake()

    def _talking(self) -> Iterable[int]:
        """The peers to read from. A single peer is always read: that costs no more than a check for data."""
        if len(self._connections) == 1:
            return self._connections
        ready = [descriptor for descriptor, _ in self._poller().poll(0)]
        blocked = [peer for peer, connection in self._connections.items() if connection.unsent]
        return {*blocked, *(self._peers[descriptor] for descriptor in ready if descriptor != self._wake)}

    def _open(self, peer: int, frames: list[bytes]) -> list[tuple[int, bytes]]:
        """The messages in frames from ``peer``, as (sender, data)."""
        return [(peer, data) for data in frames]

    @override
    def peek(self) -> bool:
        return bool(self._aside) or any(descriptor != self._wake for descriptor, _ in self._poller().poll(0))

    @override
    def poll(self, timeout: float | None) -> None:
        woken = self._wake in wait(self._poller(), self._connections.values(), timeout)
        if woken and not self._aside:  # or another thread, which does not receive, would take the wake
            self._clear_wake()

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

    @override
    def wake(self) -> None:
        token = object()
        self._waking.add(token)
        try:
            if not self._closed:
                os.eventfd_write(self._wake, 1)
        finally:
            self._waking.discard(token)

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + FLUSH_SECONDS
        for connection in self._connections.values():
            connection.drain(deadline)
            connection.hang_up()
        self._part(deadline)
        os.eventfd_write(self._end, 1)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(FLUSH_SECONDS)
        self._release()
        os.close(self._end)
        while self._waking and time.monotonic() < deadline + FLUSH_SECONDS:
            time.sleep(0.001)
        if not self._waking:  # a remaining caller was interrupted, and must not write to a foreign descriptor
            os.close(self._wake)

    def _part(self, deadline: float) -> None:
        """Called after the hang-up and before the release; may wait until ``deadline``, in monotonic seconds."""
        return

    def _release(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    @override
    def disown(self) -> None:
        if self._closed:  # the job ended before the fork, and the numbers may be those of foreign descriptors now
            return
        self._closed = True
        self._release()
        os.close(self._wake)
        os.close(self._end)
