"""The listening side: a rank listens, and admits the ranks that prove that they know the secret of the job.

Any host on the network can connect here. Therefore this module limits the number of unauthenticated connections and
reserves the descriptors of the job. A stranger, silent or talkative, cannot delay or end the job.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from collectives import descriptors
from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError
from collectives.control.frames import FrameReader, Wire, nonce, seal, unseal
from collectives.control.hello import Hello, LocalEnd, pack_answer, unpack_answer, unpack_hello
from collectives.control.sockets import end_in_silence

__all__ = ["Admission", "Peer"]

logger = logging.getLogger(__name__)

HELLO_BYTES = 1 << 16
MOST_CANDIDATES = 64
LEAST_CANDIDATES = 4
SILENCE_SECONDS = 0.5
"""How long a connection may be silent while others wait for its place, in seconds."""
PAUSE_SECONDS = 0.1
LACK_SECONDS = 0.5
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Peer:
    """An authenticated rank, and the nonce that it expects in the answers."""

    wire: Wire
    reader: FrameReader
    hello: Hello
    nonce: bytes

    def answer(self, secret: bytes, value: object, error: BaseException | None = None) -> None:
        """Send ``value``, or the ``error`` that keeps the ranks from connecting."""
        self.wire.send(seal(secret, self.nonce, pack_answer(value, error)))


@dataclass(slots=True)
class _Candidate:
    """A connection that is not authenticated yet."""

    sock: socket.socket
    since: float
    challenge: bytes = field(default_factory=nonce)
    reader: FrameReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = FrameReader(self.sock, HELLO_BYTES)


class Admission:
    """Admits the ranks ``expected``, in any order and all at once. A context manager.

    When its block ends with an error, it sends the error to all admitted ranks and closes their connections. ``entry``
    is the description by which the other ranks find this admission. ``upstream`` is a connection whose end makes the
    admission useless.
    """

    def __init__(self, end: LocalEnd, expected: Collection[int], upstream: socket.socket | None = None) -> None:
        self.entry: dict[str, Any] = {}
        self._end = end
        self._expected = expected
        self._upstream = upstream
        self._listeners: dict[int, socket.socket] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._peers: dict[int, Peer] = {}
        self._elsewhere: dict[int, str] = {}
        self._poller = select.poll()
        self._capacity = descriptors.share_of_strangers(len(expected), LEAST_CANDIDATES, MOST_CANDIDATES)
        self._paused_until = 0.0
        self._lacking_since: float | None = None
        self._is_listening = False
        self._warned: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Admission:
        with ExitStack() as stack:
            name = f"\0hvd-cluster-{secrets.token_hex(16)}"
            local = stack.enter_context(self._listen(socket.AF_UNIX, name))
            remote = stack.enter_context(self._listen(family_of(self._end.address), (self._end.address, 0)))
            self._stack = stack.pop_all()
        self._listeners = {listener.fileno(): listener for listener in (local, remote)}
        self.entry = {
            "id": secrets.token_hex(8),
            "host": self._end.hello.host,
            "unix": name,
            "tcp": remote.getsockname(),
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the listeners and the candidates; on an error, send it to the peers and close them, too."""
        self._stack.close()
        for candidate in self._candidates.values():
            candidate.sock.close()
        if error is not None:
            for peer in self._peers.values():
                self._tell(peer, error)
                peer.wire.sock.close()

    def _tell(self, peer: Peer, error: BaseException) -> None:
        with suppress(OSError, HorovodInternalError):
            peer.answer(self._end.secret, None, error)

    def _listen(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(len(self._expected) + MOST_CANDIDATES)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise SettingsError(
                f"rank {self._end.hello.rank} cannot listen on {address!r}: {error}; HOROVOD_GLOO_IFACE can name "
                "another interface"
            ) from error
        return listener

    # Calls of the owner of the admission.

    def admit_all(self) -> dict[int, Peer]:
        """The expected ranks, once they are complete. Raises CollectiveTimeoutError that names the missing ones."""
        if self._upstream is not None:
            self._poller.register(self._upstream, select.POLLRDHUP)
        self._make_room()
        while len(self._peers) < len(self._expected):
            ready = self._end.attempt.poll(self._poller, self._next_look())
            if self._end.attempt.is_over:
                raise self._absent()
            for descriptor in ready:
                self._attend(descriptor)
            self._make_room()
        return self._peers

    def answer(self, value: object) -> None:
        """Send ``value`` to all peers; raises PeerLostError that names a rank that is gone."""
        for rank, peer in self._peers.items():
            try:
                peer.answer(self._end.secret, value)
            except OSError as error:
                raise self._lost(rank, error) from error

    def collect(self) -> dict[int, Any]:
        """The answer of each peer, by rank. Raises a peer's error, PeerLostError, or CollectiveTimeoutError."""
        found: dict[int, Any] = {}
        ranks = {peer.wire.sock.fileno(): rank for rank, peer in self._peers.items()}
        while len(found) < len(ranks):
            ready = self._end.attempt.wait(dict.fromkeys(ranks, select.POLLIN))
            if not ready:
                raise self._without_offer(found)
            for rank in [ranks[descriptor] for descriptor in ready]:
                if rank in found:
                    raise self._reason_of(rank, self._without_offer(found))
                frame = self._read(rank)
                if frame is not None:
                    found[rank] = unpack_answer(frame)
        return found

    def _without_offer(self, found: Collection[int]) -> CollectiveTimeoutError:
        ranks = sorted(set(self._peers).difference(found))
        return CollectiveTimeoutError(f"ranks {ranks} did not say in time how to reach them", ranks)

    def _read(self, rank: int) -> bytes | None:
        try:
            return self._peers[rank].reader.read()
        except OSError as error:
            raise self._lost(rank, error) from error

    def _reason_of(self, rank: int, late: CollectiveTimeoutError) -> Exception:
        """The reason why an admitted rank left: the error that it sent, or its loss; ``late`` where its time is over.

        Such a rank does not know the missing ones.
        """
        try:
            frame = self._peers[rank].reader.read()
            if frame is not None:
                unpack_answer(frame)
        except OSError as error:
            return self._lost(rank, error)
        except CollectiveTimeoutError:
            return late
        except HorovodInternalError as error:
            return self._lost(rank, error)
        return self._lost(rank, ConnectionResetError("the other side closed the connection"))

    def _lost(self, rank: int, error: Exception) -> PeerLostError:
        host = self._peers[rank].hello.host
        text = f"rank {rank} on host {host!r} is gone: its process ended or its connection broke ({error}) while the "
        return PeerLostError(text + "ranks connected; look at the output of that rank", [rank], [host])

    def _absent(self) -> CollectiveTimeoutError:
        missing = [rank for rank in self._expected if rank not in self._peers]
        hello = self._end.hello
        called = [f"rank {rank} called in {self._elsewhere[rank]}" for rank in missing if rank in self._elsewhere]
        outside = f" ({', '.join(called[:MOST_NAMED])}; rank {hello.rank} is in {hello.world})" if called else ""
        return CollectiveTimeoutError(
            f"ranks {missing} of {hello.size} did not connect to rank {hello.rank} in time; look at their output, or "
            f"raise HOROVOD_GLOO_TIMEOUT_SECONDS{outside}",
            missing,
        )

    # Incoming connections.

    def _next_look(self) -> float:
        """When there may be room again, in monotonic seconds."""
        if self._is_listening:
            return self._end.attempt.deadline
        full = len(self._candidates) >= self._capacity
        return self._oldest().since + SILENCE_SECONDS if full else self._paused_until

    def _make_room(self) -> None:
        """Listen again where that is possible; close the oldest connection where there are too many."""
        now = time.monotonic()
        if len(self._candidates) >= self._capacity:
            self._warn(
                "one of too many unauthenticated connections", "; if it was a rank, raise the limit of ulimit -n"
            )
            if now >= self._oldest().since + SILENCE_SECONDS:
                self._drop_oldest()
        may_listen = len(self._candidates) < self._capacity and now >= self._paused_until
        if may_listen != self._is_listening:
            self._is_listening = may_listen
            for descriptor in self._listeners:
                if may_listen:
                    self._poller.register(descriptor, select.POLLIN)
                else:
                    self._poller.unregister(descriptor)

    def _drop_oldest(self) -> None:
        """Close the oldest unauthenticated connection, unless its hello has come in the meantime."""
        descriptor = self._oldest().sock.fileno()
        self._attend(descriptor)
        if descriptor in self._candidates:
            self._release(descriptor).sock.close()

    def _oldest(self) -> _Candidate:
        return next(iter(self._candidates.values()))

    def _attend(self, descriptor: int) -> None:
        if self._upstream is not None and descriptor == self._upstream.fileno():
            raise PeerLostError("rank 0 is gone, or has given up, while the ranks connected", [0])
        for rank, peer in self._peers.items():
            if descriptor == peer.wire.sock.fileno():
                raise self._reason_of(rank, self._absent())
        try:
            if descriptor in self._listeners:
                self._accept(self._listeners[descriptor])
            elif descriptor in self._candidates:
                self._hear(self._candidates[descriptor])
        except (OSError, HorovodInternalError, ValueError, TypeError) as error:
            if isinstance(error, _FatalHelloError):
                raise error.reason from None
            if descriptor in self._candidates:
                self._release(descriptor).sock.close()
            self._warn("a connection", f": {error}")

    def _warn(self, what: str, why: str) -> None:
        """Log each kind of problem once: a stranger must not fill the log."""
        level = logging.DEBUG if what in self._warned else logging.WARNING
        self._warned.add(what)
        logger.log(level, "%s to rank %d was refused%s", what, self._end.hello.rank, why)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if descriptors.are_exhausted(error):
                self._pause(error)
                return
            raise
        self._lacking_since = None
        sock.setblocking(False)
        candidate = self._candidates[sock.fileno()] = _Candidate(sock, time.monotonic())
        self._poller.register(sock, select.POLLIN)
        end_in_silence(sock, self._end.heartbeat)
        sock.send(candidate.challenge, socket.MSG_NOSIGNAL)

    def _pause(self, error: OSError) -> None:
        """No descriptor is left: drop the oldest connection if it is silent, and accept no other for a while.

        Without any connection to drop, the lack ends the start of all ranks after some time.
        """
        self._warn("a connection", f": {descriptors.EXHAUSTED}")
        now = time.monotonic()
        self._paused_until = now + PAUSE_SECONDS
        if self._candidates:
            if now >= self._oldest().since + SILENCE_SECONDS:
                self._drop_oldest()
            return
        self._lacking_since = self._lacking_since or now
        if now > self._lacking_since + LACK_SECONDS:
            raise _FatalHelloError(error)

    def _hear(self, candidate: _Candidate) -> None:
        frame = candidate.reader.read()
        if frame is None:
            return
        hello, nonce, admission = unpack_hello(unseal(self._end.secret, candidate.challenge, frame))
        if admission != self.entry["id"]:
            raise PeerLostError("it was meant for another process, which listened at this address before")
        wire = Wire(self._release(candidate.sock.fileno()).sock, self._end.attempt)
        self._admit(Peer(wire, FrameReader(wire.sock), hello, nonce))

    def _release(self, descriptor: int) -> _Candidate:
        self._poller.unregister(descriptor)
        return self._candidates.pop(descriptor)

    def _admit(self, peer: Peer) -> None:
        reason = self._objection(peer.hello)
        if reason is None:
            self._peers[peer.hello.rank] = peer
            self._poller.register(peer.wire.sock, select.POLLRDHUP)
            return
        self._tell(peer, reason)
        peer.wire.sock.close()
        if isinstance(reason, _OtherWorldError) and not reason.is_later:
            self._elsewhere[peer.hello.rank] = peer.hello.world
            self._warn("a rank of another world", f": {reason}")
        else:
            raise _FatalHelloError(reason)

    def _objection(self, hello: Hello) -> Exception | None:
        mine = self._end.hello
        if (hello.job, hello.round) != (mine.job, mine.round):
            return _OtherWorldError(hello, mine)
        if hello.size != mine.size:
            return SettingsError(
                f"rank {hello.rank} was started for {hello.size} ranks and rank {mine.rank} for {mine.size}; "
                "start all with one HOROVOD_SIZE"
            )
        if hello.rank in self._peers or hello.rank not in self._expected:
            return SettingsError(f"two processes say they are rank {hello.rank}; each needs its own HOROVOD_RANK")
        return None


class _OtherWorldError(PeerLostError):
    """The two ranks were given different worlds. ``is_later``: the world of the other rank replaces this one."""

    def __init__(self, other: Hello, mine: Hello) -> None:
        super().__init__(
            f"rank {other.rank} is in {other.world}, rank {mine.rank} in {mine.world}; only ranks of one world can "
            "connect: ask the launcher for the current one"
        )
        self.is_later = other.job == mine.job and other.round > mine.round


class _FatalHelloError(ValueError):
    """An authentic hello, or a lack of descriptors, that keeps all ranks from starting."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address of a network."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
