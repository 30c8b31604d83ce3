"""Reads of the store that the ranks of one host share: one of them reads for all.

A store that answers thousands of ranks, one by one, keeps all of them waiting. So in a large job the first process of a
host that reads listens for the others, at a name that only the job can compute. It asks the store once for a key that
several of them want. Nobody depends on it: where it ends, is stopped or is busy, the others ask the store themselves.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import msgpack

from collectives.net.attempts import attempts
from collectives.net.frames import NONCE_BYTES, Opener, Sealer, digest, keys, nonce
from collectives.net.strangers import DEADLINE, PAUSE, Strangers
from collectives.net.wire import LONGEST_ANSWER, introduce, receive, receive_frame

Fetch = Callable[[str, float], bytes | None]
"""A key, and the deadline in monotonic seconds -> its value, or None if there is none by then."""

ACKNOWLEDGE_SECONDS = 1.0
"""A process that has not acknowledged a request after this time is stopped or busy."""
ASK_SECONDS = 3.0
"""A request ends after this time and is made again: so nobody waits for a process that has been stopped meanwhile."""
FETCH_SECONDS = 20.0
"""A request to the store ends after this time, so that those who wait hear of a store that is silent."""
KEEP_SECONDS = 1.0
"""How long a value is kept for the ranks that come a little later; then the store may have another one."""
ALONE_SECONDS = 30.0
"""How long a rank reads alone after it had to."""
TAKEOVER_SECONDS = 0.5
"""How long the ranks look for another one to read for them, once theirs has ended."""
MOST_STRANGERS = 64
BACKLOG = 64
LOST = False
"""The answer where the store cannot be read. None says that there is no value yet."""
END = "the rank that reads for this host has ended"


class CacheLostError(Exception):
    """Nobody reads for this rank; it must do so itself."""


@dataclass(slots=True)
class _Reading:
    """A request to the store that is under way, or what has come of it: a value, none, or an error."""

    is_done: bool = False
    value: bytes | None = None
    error: Exception | None = None


class SharedReads:
    """Reads each key once for all threads that want it at a time. ``fetch`` reads from the store."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()  # Held for a few instructions, and to wait for a reading.
        self._readings: dict[str, _Reading] = {}
        self._kept: dict[str, tuple[bytes, float]] = {}
        self._is_closed = False

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def read(self, key: str, deadline: float) -> bytes | None:
        """The value of ``key``; None if there is none by ``deadline``.

        Raises CacheLostError where the store cannot be read, and ConnectionAbortedError after :meth:`close`.
        """
        with self._changed:
            while not self._is_closed:
                value = self._kept_value(key)
                if value is not None:
                    return value
                reading = self._readings.get(key) or self._begin(key)
                if not self._changed.wait_for(partial(self._is_over, reading), _until(deadline)):
                    return None
                if reading.error is not None:
                    raise CacheLostError(str(reading.error)) from reading.error
                if reading.value is not None:
                    return reading.value
        raise ConnectionAbortedError(END)

    def _kept_value(self, key: str) -> bytes | None:
        now = time.monotonic()
        self._kept = {name: kept for name, kept in self._kept.items() if now < kept[1]}
        return self._kept[key][0] if key in self._kept else None

    def _begin(self, key: str) -> _Reading:
        reading = _Reading()
        # Owned by this object. Bound: FETCH_SECONDS, and the patience of the client, whose end also ends it.
        thread = threading.Thread(target=self._run, args=(key, reading), name="hvd-store-read", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # this process may have no more threads
            raise CacheLostError(str(error)) from error
        self._readings[key] = reading  # it cannot end before, because this thread has the lock
        return reading

    def _run(self, key: str, reading: _Reading) -> None:
        try:
            reading.value = self._fetch(key, time.monotonic() + FETCH_SECONDS)
        except Exception as error:  # noqa: BLE001 - without an error, those who wait would begin again, at once
            reading.error = error
        finally:
            self._finish(key, reading)

    def _finish(self, key: str, reading: _Reading) -> None:
        with self._changed:
            reading.is_done = True
            del self._readings[key]
            if reading.value is not None:
                self._kept[key] = reading.value, time.monotonic() + KEEP_SECONDS
            self._changed.notify_all()

    def _is_over(self, reading: _Reading) -> bool:
        return reading.is_done or self._is_closed


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _until(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


_servers: weakref.WeakSet[HostServer] = weakref.WeakSet()


class HostServer:
    """Reads through ``reads`` for the processes of this host that call at the abstract ``name`` and know ``secret``.

    Raises OSError if another process has the name. Owns the daemon thread "hvd-store-host", and one for each
    connection; :meth:`close` ends them all. :mod:`collectives.net.strangers` limits the connections of strangers.
    """

    def __init__(self, name: str, secret: bytes, reads: SharedReads) -> None:
        self._secret = secret
        self._reads = reads
        self._lock = threading.Lock()  # Held for a few instructions.
        self._connections: dict[int, socket.socket] = {}
        self._strangers = Strangers(most=MOST_STRANGERS)
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(name)
            self._listener.listen(BACKLOG)
            self._listener.setblocking(False)
            threading.Thread(target=self._accept, name="hvd-store-host", daemon=True).start()
        except BaseException:
            self._listener.close()
            raise
        _servers.add(self)

    def close(self) -> None:
        """Close the listener and all connections."""
        with self._lock:
            self._is_closed = True
            for sock in (self._listener, *self._connections.values()):
                _shut_down(sock)
        self._reads.close()

    def disown(self) -> None:
        """In a forked child: close the copies of the sockets, so that the name is free when the parent has ended."""
        for sock in (self._listener, *self._connections.values()):
            sock.close()

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        with self._listener:
            while not self._is_closed:
                now = time.monotonic()
                with self._lock:
                    self._make_room(now)
                    may_accept, look = self._strangers.may_accept(now), self._strangers.next_look(now)
                if not may_accept:
                    time.sleep(PAUSE)
                elif poller.poll(None if look == math.inf else 1e3 * max(0.0, look - now)):
                    self._take()

    def _make_room(self, now: float) -> None:
        for descriptor in {*self._strangers.overdue(now), *self._strangers.in_the_way(now)}:
            _shut_down(self._connections[descriptor])
            self._strangers.discard(descriptor)

    def _take(self) -> None:
        with self._lock, suppress(OSError):
            sock = self._strangers.next_from(self._listener, time.monotonic())
            if sock is not None:
                self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            threading.Thread(target=self._attend, args=(sock,), name="hvd-store-host", daemon=True).start()
        except RuntimeError:  # this process may have no more threads
            self._strangers.discard(sock.fileno())
            sock.close()
            return
        self._connections[sock.fileno()] = sock  # it cannot end before, because this thread has the lock

    def _attend(self, sock: socket.socket) -> None:
        descriptor = sock.fileno()
        with suppress(OSError, ValueError, TypeError):
            sock.settimeout(DEADLINE)
            opener, sealer, request = self._admitted(sock)
            with self._lock:
                self._strangers.discard(descriptor)
            while True:
                sock.sendall(sealer.seal(b""))
                sock.sendall(sealer.seal(self._answer(*msgpack.unpackb(request))))
                request = opener.open(receive_frame(sock, END))
        with self._lock, sock:  # the next connection may have the same descriptor
            self._strangers.discard(descriptor)
            del self._connections[descriptor]

    def _answer(self, key: str, seconds: float) -> bytes:
        try:
            value: bytes | bool | None = self._reads.read(key, time.monotonic() + min(seconds, ASK_SECONDS))
        except CacheLostError:
            value = LOST
        packed: bytes = msgpack.packb(value)
        return packed

    def _admitted(self, sock: socket.socket) -> tuple[Opener, Sealer, bytes]:
        """The two directions of the connection, and the first request. Raises PermissionError for a stranger."""
        own = nonce()
        sock.sendall(own)
        incoming, outgoing = keys(self._secret, receive(sock, NONCE_BYTES, END), own)
        opener = Opener(incoming)
        return opener, Sealer(outgoing), opener.open(receive_frame(sock, END))


def _disown_all() -> None:
    for server in _servers:
        server.disown()
    _servers.clear()


os.register_at_fork(after_in_child=_disown_all)


class HostCache:
    """The reads of a process that shares them with the others of ``host``, in the job of ``secret`` and ``server``.

    ``fetch`` reads from the store itself. For any number of threads.
    """

    def __init__(self, server: str, host: str, secret: bytes, fetch: Fetch) -> None:
        place = digest(secret, b"host cache", server.encode(), host.encode(errors="replace"))
        self._name = f"\0hvd-cluster-{place.hex()[:32]}"
        self._secret = secret
        self._reads = SharedReads(fetch)
        self._lock = threading.Lock()  # Held for a few instructions, and to open a server.
        self._server: HostServer | None = None
        self._calls: set[socket.socket] = set()
        self._closed = threading.Event()
        self._not_before = 0.0
        self._process = os.getpid()

    def get(self, key: str, deadline: float) -> bytes | None:
        """The value of ``key``; None if there is none by ``deadline``. Raises CacheLostError."""
        if self._process != os.getpid() or self._closed.is_set() or time.monotonic() < self._not_before:
            raise CacheLostError(END)
        try:
            return self._read(key, deadline)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            self._not_before = time.monotonic() + ALONE_SECONDS
            raise CacheLostError(str(error)) from error

    def close(self) -> None:
        """End all calls, also those of other processes, which then read themselves."""
        with self._lock:
            self._closed.set()
            calls, server = list(self._calls), self._server
        for sock in calls:
            _shut_down(sock)
        if server is not None:
            server.close()
        self._reads.close()

    def _read(self, key: str, deadline: float) -> bytes | None:
        for _ in attempts(TAKEOVER_SECONDS, self._closed.wait):
            try:
                return self._reads.read(key, deadline) if self._serves() else self._ask(key, deadline)
            except ConnectionError as error:  # the process has ended that read for this host: another one does now
                lost = error
            if self._closed.is_set():
                break
        raise lost

    def _serves(self) -> bool:
        """Whether this process reads for the others: it does from now on, if nobody else does."""
        with self._lock:
            if self._server is None and not self._closed.is_set():
                try:
                    self._server = HostServer(self._name, self._secret, self._reads)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
            return self._server is not None

    def _ask(self, key: str, deadline: float) -> bytes | None:
        with self._called() as sock:
            soon = time.monotonic() + ACKNOWLEDGE_SECONDS
            sealer, opener = introduce(sock, self._secret, _request(key, deadline), END, soon)
            while True:
                opener.open(receive_frame(sock, END, deadline=soon))
                late = time.monotonic() + min(_until(deadline), ASK_SECONDS) + ACKNOWLEDGE_SECONDS
                value = _value(opener.open(receive_frame(sock, END, LONGEST_ANSWER, late)))
                if value is not None or time.monotonic() >= deadline:
                    return value
                sock.settimeout(ACKNOWLEDGE_SECONDS)
                soon = time.monotonic() + ACKNOWLEDGE_SECONDS
                sock.sendall(sealer.seal(_request(key, deadline)))

    @contextmanager
    def _called(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(ACKNOWLEDGE_SECONDS)
            sock.connect(self._name)
            with self._lock:
                if self._closed.is_set():
                    raise ConnectionAbortedError(END)
                self._calls.add(sock)
            try:
                yield sock
            finally:
                with self._lock:
                    self._calls.discard(sock)


def _value(answer: bytes) -> bytes | None:
    value: bytes | bool | None = msgpack.unpackb(answer)
    if isinstance(value, bool):
        raise CacheLostError("the store cannot be read")
    return value


def _request(key: str, deadline: float) -> bytes:
    packed: bytes = msgpack.packb((key, _until(deadline)))
    return packed
