"""How the connections of a job come about: rank 0 listens, the others connect and prove themselves.

Both sides prove that they know the job's secret by HMAC-SHA256 over the other's nonce, so that neither a stranger nor
a rank of another job gets in. Nothing is decoded before it was authenticated. Rank 0 lets nobody start unless all can,
and tells everybody the same reason. When it has told all who is where, the ranks of a host that gets a relay meet again
in the same way, at the door of their leader.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError, Store, Timeouts
from collectives.control.configuration import disagreement
from collectives.control.relay import Relay
from collectives.control.sockets import Connection, SocketChannel, end_in_silence
from collectives.control.tree import Center, Leader, Leaf, relays
from collectives.planning.aggregation import Aggregator
from collectives.planning.process_sets import ProcessSets

__all__ = ["Hello", "Meeting", "connect_channel"]

logger = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
NONCE_BYTES = 32
MAC_BYTES = 32
HELLO_BYTES = 1 << 16
LARGEST_BYTES = 1 << 24
RETRY_SECONDS = 0.05
STRANGERS = 64


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself when it connects.

    ``cores`` are those that its process may use. ``configuration`` is what all ranks must have set to the same, as
    name -> value.
    """

    rank: int
    size: int
    host: str
    cores: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))
    configuration: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What has come about.

    ``hosts[r]`` is the host of rank ``r``. ``cores`` is the number of distinct cores that the ranks of this rank's host
    may use; it is the same on all of them.
    """

    channel: SocketChannel
    hosts: tuple[str, ...]
    cores: int


def connect_channel(
    hello: Hello, store: Store, secret: bytes, address: str, timeouts: Timeouts, process_sets: ProcessSets
) -> Meeting:
    """Meet the other ranks.

    ``address`` is where this rank listens for other hosts, if it has to. Raises CollectiveTimeoutError that names the
    ranks that did not come, PeerLostError, SettingsError when the ranks were started in different ways.
    """
    place = _Place(hello, store, secret, address, timeouts, time.monotonic() + timeouts.connect)
    return _center(place) if hello.rank == 0 else _member(place, process_sets)


@dataclass(frozen=True, slots=True)
class _Place:
    """Who this rank is, where it meets others, and until when, in monotonic seconds."""

    hello: Hello
    store: Store
    secret: bytes
    address: str
    timeouts: Timeouts
    deadline: float

    @property
    def remaining(self) -> float:
        """Seconds; more than none, which would mean not to wait at all."""
        return max(0.001, self.deadline - time.monotonic())


# Rank 0.


def _center(place: _Place) -> Meeting:
    hello = place.hello
    with _listening(place, range(1, hello.size)) as door:
        peers = door.admit_all()
        hellos = [hello, *(peers[rank].hello for rank in range(1, hello.size))]
        problem = disagreement([each.configuration for each in hellos])
        if problem is not None:
            raise door.refuse(problem)
    hosts = tuple(each.host for each in hellos)
    cores = _cores(hellos)
    connections = {rank: Connection(peer.sock) for rank, peer in peers.items()}
    for rank, connection in connections.items():
        connection.send(peers[rank].sealed(place.secret, ("", hosts, cores)))
        connection.drain(place.deadline)
    return Meeting(_channel_of_center(hosts, connections), hosts, cores[hello.host])


def _cores(hellos: Sequence[Hello]) -> dict[str, int]:
    """For each host the number of cores that its ranks may use together."""
    cores: dict[str, set[int]] = {}
    for hello in hellos:
        cores.setdefault(hello.host, set()).update(hello.cores)
    return {host: len(numbers) for host, numbers in cores.items()}


def _channel_of_center(hosts: Sequence[str], connections: Mapping[int, Connection]) -> SocketChannel:
    served = relays(hosts)
    if not served:
        return SocketChannel(0, len(hosts), connections)
    followers = {rank for leader, ranks in served.items() for rank in ranks if rank != leader}
    direct = {rank: connection for rank, connection in connections.items() if rank not in followers}
    return Center(len(hosts), direct, served, {rank: connections[rank] for rank in followers})


# The others.


def _member(place: _Place, process_sets: ProcessSets) -> Meeting:
    rank = place.hello.rank
    sock, (problem, told, cores) = _join(place, 0)
    with ExitStack() as stack:
        stack.callback(sock.close)
        if problem:
            raise SettingsError(problem)
        hosts = tuple(told)
        found = [(leader, ranks) for leader, ranks in relays(hosts).items() if rank in ranks]
        channel: SocketChannel
        if not found:
            channel = SocketChannel(rank, len(hosts), {0: Connection(sock)})
        elif found[0][0] == rank:
            channel = _lead(place, Connection(sock), Aggregator(found[0][1], process_sets), found[0][1])
        else:
            channel = _follow(place, found[0][0], Connection(sock))
        stack.pop_all()
    return Meeting(channel, hosts, cores[place.hello.host])


def _lead(place: _Place, center: Connection, aggregator: Aggregator, ranks: Sequence[int]) -> Leader:
    rank = place.hello.rank
    with _listening(place, ranks[1:]) as door:
        peers = door.admit_all()
    connections = {each: Connection(peer.sock) for each, peer in peers.items()}
    for each, connection in connections.items():
        connection.send(peers[each].sealed(place.secret, ("", (), {})))
    mine, theirs = socket.socketpair()
    relay = Relay(rank, center, {rank: Connection(theirs), **connections}, aggregator)
    return Leader(rank, place.hello.size, Connection(mine), relay)


def _follow(place: _Place, leader: int, lifeline: Connection) -> Leaf:
    sock, (problem, *_) = _join(place, leader)
    if problem:
        sock.close()
        raise SettingsError(problem)
    return Leaf(place.hello.rank, place.hello.size, leader, Connection(sock), lifeline)


# The door.


@contextmanager
def _listening(place: _Place, expected: Collection[int]) -> Iterator[_Door]:
    """A door for the ranks ``expected``; those who came in are sent away when the block ends with an error."""
    name = f"\0hvd-cluster-{secrets.token_hex(16)}"
    backlog = len(expected) + STRANGERS
    with (
        _listen(socket.AF_UNIX, name, place, backlog) as local,
        _listen(socket.AF_INET, (place.address, 0), place, backlog) as remote,
    ):
        where = {"host": place.hello.host, "unix": name, "tcp": remote.getsockname()}
        place.store.set(_key(place.hello.rank), msgpack.packb(where))
        with _Door(place, (local, remote), expected) as door:
            yield door


def _key(rank: int) -> str:
    """Where in the store the address of ``rank`` is."""
    return f"control-{rank}"


def _listen(family: int, address: Any, place: _Place, backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"rank {place.hello.rank} cannot listen on {address!r}: {error}; HOROVOD_GLOO_IFACE can name another "
            "interface"
        ) from error
    return listener


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank that has proved itself, and the nonce it wants to see in the answer."""

    sock: socket.socket
    hello: Hello
    nonce: bytes

    def sealed(self, secret: bytes, reply: object) -> bytes:
        return _sealed(secret, self.nonce, msgpack.packb(reply))


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
    """Where a rank lets others in, in any order and all at once: a stranger neither ends nor holds up the job."""

    def __init__(self, place: _Place, listeners: Sequence[socket.socket], expected: Collection[int]) -> None:
        self._place = place
        self._expected = expected
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._guests: dict[int, _Guest] = {}
        self._peers: dict[int, _Peer] = {}
        self._poller = select.poll()
        for descriptor in self._listeners:
            self._poller.register(descriptor, select.POLLIN)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Send the guests away; on an error, the peers, too."""
        for guest in self._guests.values():
            guest.sock.close()
        if kind is not None:
            for peer in self._peers.values():
                peer.sock.close()

    def admit_all(self) -> dict[int, _Peer]:
        """The expected ranks, once they are complete."""
        while len(self._peers) < len(self._expected):
            ready = self._poller.poll(max(0.0, self._place.deadline - time.monotonic()) * 1000.0)
            if not ready or time.monotonic() > self._place.deadline:
                raise self._absent()
            for descriptor, _ in ready:
                self._attend(descriptor)
        return self._peers

    def refuse(self, problem: str, *others: _Peer) -> SettingsError:
        """Tell all who came, and ``others``, why the job does not start; returns the error for this rank."""
        for peer in (*self._peers.values(), *others):
            with suppress(OSError):
                _send(peer.sock, peer.sealed(self._place.secret, (problem, (), {})))
        return SettingsError(problem)

    def _absent(self) -> CollectiveTimeoutError:
        missing = [rank for rank in self._expected if rank not in self._peers]
        hello = self._place.hello
        return CollectiveTimeoutError(
            f"ranks {missing} of {hello.size} did not connect to rank {hello.rank} in time; look at their output, or "
            "raise HOROVOD_GLOO_TIMEOUT_SECONDS"
        )

    def _attend(self, descriptor: int) -> None:
        try:
            if descriptor in self._listeners:
                self._greet(self._listeners[descriptor])
                return
            peer = self._hear(self._guests[descriptor])
        except (OSError, HorovodInternalError, ValueError, TypeError) as error:
            logger.warning("a connection to rank %d was refused: %s", self._place.hello.rank, error)
            if descriptor in self._guests:
                self._release(descriptor).sock.close()
            return
        if peer is not None:
            self._release(descriptor)
            self._admit(peer)

    def _greet(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        guest = _Guest(sock)
        self._guests[sock.fileno()] = guest
        self._poller.register(sock, select.POLLIN)
        end_in_silence(sock, self._place.timeouts.heartbeat)
        sock.send(guest.nonce)

    def _hear(self, guest: _Guest) -> _Peer | None:
        """A guest who knows the secret; None while it has not said everything."""
        said = guest.hear()
        if said is None:
            return None
        nonce, rank, size, host, cores, configuration = msgpack.unpackb(_open(self._place.secret, guest.nonce, said))
        return _Peer(guest.sock, Hello(rank, size, host, tuple(cores), dict(configuration)), nonce)

    def _admit(self, peer: _Peer) -> None:
        problem = self._objection(peer.hello)
        if problem is not None:
            with peer.sock:
                raise self.refuse(problem, peer)
        self._peers[peer.hello.rank] = peer

    def _release(self, descriptor: int) -> _Guest:
        self._poller.unregister(descriptor)
        return self._guests.pop(descriptor)

    def _objection(self, hello: Hello) -> str | None:
        mine = self._place.hello
        if hello.size != mine.size:
            return (
                f"rank {hello.rank} was started for {hello.size} ranks and rank {mine.rank} for {mine.size}; "
                "start all with one HOROVOD_SIZE"
            )
        if hello.rank in self._peers or hello.rank not in self._expected:
            return f"two processes say they are rank {hello.rank}; each needs its own HOROVOD_RANK"
        return None


# Going to a door.


def _join(place: _Place, host: int) -> tuple[socket.socket, Any]:
    """A connection to rank ``host``, and its reply: what is wrong (if anything), the hosts, the cores of each host."""
    rank = place.hello.rank
    where = msgpack.unpackb(place.store.get(_key(host), max(0.0, place.deadline - time.monotonic())))
    sock = _connect(place, where, host)
    try:
        return sock, msgpack.unpackb(_prove(place, sock))
    except TimeoutError as error:
        sock.close()
        raise CollectiveTimeoutError(f"rank {rank}: not all ranks connected to rank {host} in time") from error
    except OSError as error:
        sock.close()
        raise PeerLostError(f"rank {rank}: the connection to rank {host} broke: {error}") from error
    except BaseException:
        sock.close()
        raise


def _prove(place: _Place, sock: socket.socket) -> bytes:
    sock.settimeout(place.remaining)
    nonce = secrets.token_bytes(NONCE_BYTES)
    challenge = _exactly(sock, NONCE_BYTES)
    hello = place.hello
    said = (nonce, hello.rank, hello.size, hello.host, hello.cores, dict(hello.configuration))
    _send(sock, _sealed(place.secret, challenge, msgpack.packb(said)))
    return _open(place.secret, nonce, _receive(sock))


def _connect(place: _Place, where: Mapping[str, Any], host: int) -> socket.socket:
    if where["host"] == place.hello.host:
        try:
            return _dial(place, socket.AF_UNIX, where["unix"])
        except OSError:
            logger.debug("rank %d is on this host but in another network namespace; using TCP", host)
    while True:
        try:
            return _dial(place, socket.AF_INET, tuple(where["tcp"]))
        except OSError as error:
            if time.monotonic() > place.deadline:
                raise PeerLostError(f"rank {host} does not answer at {where['tcp']}: {error}") from error
            time.sleep(RETRY_SECONDS)


def _dial(place: _Place, family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(place.remaining)
        sock.connect(address)
        end_in_silence(sock, place.timeouts.heartbeat)
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
