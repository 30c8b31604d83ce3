"""How the connections of a :class:`SocketChannel` come about: rank 0 listens, the others connect and prove themselves.

Both sides prove that they know the job's secret by HMAC-SHA256 over the other's nonce, so that neither a stranger nor
a rank of another job gets in. Nothing is decoded before it was authenticated.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError, Store
from collectives.control.sockets import Connection, SocketChannel

__all__ = ["Hello", "connect_channel"]

logger = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
NONCE_BYTES = 32
MAC_BYTES = 32
HELLO_BYTES = 1 << 16
LARGEST_BYTES = 1 << 24
RETRY_SECONDS = 0.05
STRANGERS = 64
ADDRESS_KEY = "control"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself when it connects."""

    rank: int
    size: int
    host: str


def connect_channel(
    hello: Hello, store: Store, secret: bytes, address: str, timeout: float
) -> tuple[SocketChannel, tuple[str, ...]]:
    """The channel of this rank and the host of each rank.

    ``address`` is where rank 0 listens for other hosts. Raises CollectiveTimeoutError that names the ranks that did
    not come, PeerLostError, SettingsError when the ranks were started with different sizes.
    """
    deadline = time.monotonic() + timeout
    if hello.rank == 0:
        return _accept_all(hello, store, secret, address, deadline)
    return _join(hello, store, secret, deadline)


def _accept_all(
    hello: Hello, store: Store, secret: bytes, address: str, deadline: float
) -> tuple[SocketChannel, tuple[str, ...]]:
    name = f"\0hvd-cluster-{secrets.token_hex(16)}"
    with (
        _listen(socket.AF_UNIX, name, hello.size + STRANGERS) as local,
        _listen(socket.AF_INET, (address, 0), hello.size + STRANGERS) as remote,
    ):
        where = {"host": hello.host, "unix": name, "tcp": remote.getsockname()}
        store.set(ADDRESS_KEY, msgpack.packb(where))
        peers = _Door(hello, secret, (local, remote)).admit_all(deadline)
    hosts = (hello.host, *(peers[rank].host for rank in range(1, hello.size)))
    connections = {rank: Connection(peer.sock) for rank, peer in peers.items()}
    for rank, connection in connections.items():
        connection.send(_sealed(secret, peers[rank].nonce, msgpack.packb(hosts)))
    return SocketChannel(0, hello.size, connections), hosts


def _listen(family: int, address: Any, backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"rank 0 cannot listen on {address!r}: {error}; HOROVOD_GLOO_IFACE can name another interface"
        ) from error
    return listener


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank that has proved itself, and the nonce it wants to see in the answer."""

    sock: socket.socket
    host: str
    nonce: bytes


@dataclass(slots=True)
class _Guest:
    """Somebody who has not proved anything yet."""

    sock: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    said: bytearray = field(default_factory=bytearray)

    def hear(self) -> bytes | None:
        """The frame that the guest has sent; None while it is incomplete."""
        piece = self.sock.recv(HELLO_BYTES)
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        self.said += piece
        if len(self.said) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self.said)
        if length > HELLO_BYTES:
            raise PeerLostError(f"a handshake of {length} bytes is refused; at most {HELLO_BYTES} are allowed")
        stop = LENGTH.size + length
        return bytes(self.said[LENGTH.size : stop]) if len(self.said) >= stop else None


class _Door:
    """Where rank 0 lets the others in, in any order and all at once: a stranger neither ends nor holds up the job."""

    def __init__(self, hello: Hello, secret: bytes, listeners: Sequence[socket.socket]) -> None:
        self._hello = hello
        self._secret = secret
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._guests: dict[int, _Guest] = {}
        self._peers: dict[int, _Peer] = {}
        self._poller = select.poll()
        for descriptor in self._listeners:
            self._poller.register(descriptor, select.POLLIN)

    def admit_all(self, deadline: float) -> dict[int, _Peer]:
        """The other ranks, once they are complete."""
        try:
            while len(self._peers) < self._hello.size - 1:
                ready = self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000.0)
                if not ready or time.monotonic() > deadline:
                    raise self._absent()
                for descriptor, _ in ready:
                    self._attend(descriptor)
        except BaseException:
            for peer in self._peers.values():
                peer.sock.close()
            raise
        finally:
            for guest in self._guests.values():
                guest.sock.close()
        return self._peers

    def _absent(self) -> CollectiveTimeoutError:
        missing = [rank for rank in range(1, self._hello.size) if rank not in self._peers]
        return CollectiveTimeoutError(
            f"ranks {missing} of {self._hello.size} did not connect to rank 0 in time; look at their output, or raise "
            "HOROVOD_GLOO_TIMEOUT_SECONDS"
        )

    def _attend(self, descriptor: int) -> None:
        try:
            if descriptor in self._listeners:
                self._greet(self._listeners[descriptor])
                return
            proof = self._hear(self._guests[descriptor])
        except (OSError, HorovodInternalError, ValueError, TypeError) as error:
            logger.warning("a connection to rank 0 was refused: %s", error)
            if descriptor in self._guests:
                self._release(descriptor).sock.close()
            return
        if proof is not None:
            self._admit(self._release(descriptor).sock, *proof)

    def _greet(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        guest = _Guest(sock)
        self._guests[sock.fileno()] = guest
        self._poller.register(sock, select.POLLIN)
        sock.send(guest.nonce)

    def _hear(self, guest: _Guest) -> tuple[int, int, str, bytes] | None:
        """Rank, size, host and nonce of a guest who knows the secret; None while it has not said everything."""
        said = guest.hear()
        if said is None:
            return None
        rank, size, host, nonce = msgpack.unpackb(_open(self._secret, guest.nonce, said))
        return rank, size, host, nonce

    def _admit(self, sock: socket.socket, rank: int, size: int, host: str, nonce: bytes) -> None:
        problem = self._objection(rank, size)
        if problem is not None:
            with sock, suppress(OSError):
                sock.send(LENGTH.pack(0))
            raise SettingsError(problem)
        self._peers[rank] = _Peer(sock, host, nonce)

    def _release(self, descriptor: int) -> _Guest:
        self._poller.unregister(descriptor)
        return self._guests.pop(descriptor)

    def _objection(self, rank: int, size: int) -> str | None:
        if size != self._hello.size:
            return (
                f"rank {rank} was started for {size} ranks and rank 0 for {self._hello.size}; "
                "start all with one HOROVOD_SIZE"
            )
        if rank in self._peers or rank == 0:
            return f"two processes say they are rank {rank}; each needs its own HOROVOD_RANK"
        return None


def _join(hello: Hello, store: Store, secret: bytes, deadline: float) -> tuple[SocketChannel, tuple[str, ...]]:
    where = msgpack.unpackb(store.get(ADDRESS_KEY, max(0.0, deadline - time.monotonic())))
    sock = _connect(where, hello.host, deadline)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = _exactly(sock, NONCE_BYTES)
        said = msgpack.packb((hello.rank, hello.size, hello.host, nonce))
        _send(sock, _sealed(secret, challenge, said))
        hosts = tuple(msgpack.unpackb(_open(secret, nonce, _receive(sock))))
    except TimeoutError as error:
        sock.close()
        raise CollectiveTimeoutError(f"rank {hello.rank}: not all ranks connected to rank 0 in time") from error
    except OSError as error:
        sock.close()
        raise PeerLostError(f"rank {hello.rank}: the connection to rank 0 broke: {error}") from error
    except BaseException:
        sock.close()
        raise
    return SocketChannel(hello.rank, hello.size, {0: Connection(sock)}), hosts


def _connect(where: dict[str, Any], host: str, deadline: float) -> socket.socket:
    if where["host"] == host:
        try:
            return _dial(socket.AF_UNIX, where["unix"], deadline)
        except OSError:
            logger.debug("rank 0 is on this host but in another network namespace; using TCP")
    while True:
        try:
            return _dial(socket.AF_INET, tuple(where["tcp"]), deadline)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLostError(f"rank 0 does not answer at {where['tcp']}: {error}") from error
            time.sleep(RETRY_SECONDS)


def _dial(family: int, address: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _sealed(secret: bytes, nonce: bytes, payload: bytes) -> bytes:
    return hmac.digest(secret, nonce + payload, hashlib.sha256) + payload


def _open(secret: bytes, nonce: bytes, sealed: bytes) -> bytes:
    payload = sealed[MAC_BYTES:]
    if not hmac.compare_digest(sealed[:MAC_BYTES], hmac.digest(secret, nonce + payload, hashlib.sha256)):
        raise PeerLostError("the other side does not know the secret of this job, or refused this rank")
    return payload


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    if length > LARGEST_BYTES:
        raise PeerLostError(f"a handshake of {length} bytes is refused; at most {LARGEST_BYTES} are allowed")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 16))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return bytes(data)
