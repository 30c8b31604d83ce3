"""Where a rank listens, and the connections there that are not authenticated yet.

:mod:`collectives.net.strangers` limits their number and time. A stranger, silent or talkative, cannot delay or
end the job.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from collectives.api import HorovodInternalError, PeerLostError, SettingsError
from collectives.handshake.hello import Hello, LocalEnd, Peer, unpack_hello
from collectives.net import descriptors
from collectives.net.frames import LONGEST_HELLO, REFUSAL, nonce, unseal
from collectives.net.interfaces import family_of
from collectives.net.sockets import end_in_silence
from collectives.net.strangers import RareWarnings, Strangers
from collectives.net.wire import Wire

logger = logging.getLogger(__name__)


ID_BYTES = 4
"""Enough to tell a listener from one that had its port before. Each host gets the ids of all ranks."""


class Listeners:
    """Those of the rank of ``hello``, whose host has ``address``. A context manager.

    ``entry`` is the description by which the other ranks find them; ``backlog`` is for each. Without ``within_host``
    there is the TCP port only.
    """

    def __init__(self, hello: Hello, address: str, backlog: int, within_host: bool = True) -> None:
        self.entry: dict[str, Any] = {}
        self._hello = hello
        self._address = address
        self._backlog = backlog
        self._within_host = within_host
        self.by_descriptor: dict[int, socket.socket] = {}

    def __enter__(self) -> Listeners:
        name = f"\0hvd-cluster-{secrets.token_hex(16)}"
        with ExitStack() as stack:
            remote = stack.enter_context(self._listen(family_of(self._address), (self._address, 0)))
            listeners = [remote]
            if self._within_host:
                listeners.append(stack.enter_context(self._listen(socket.AF_UNIX, name)))
            stack.pop_all()
        self.by_descriptor = {listener.fileno(): listener for listener in listeners}
        self.entry = {"id": secrets.token_hex(ID_BYTES), "tcp": remote.getsockname()}
        if self._within_host:
            self.entry |= {"host": self._hello.host, "unix": name}
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self.by_descriptor.values():
            listener.close()

    def _listen(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(self._backlog)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise SettingsError(
                f"rank {self._hello.rank} cannot listen on {address!r}: {error}; HOROVOD_GLOO_IFACE can name "
                "another interface"
            ) from error
        return listener


MOST_CANDIDATES = 64
LEAST_CANDIDATES = 4
LACK_SECONDS = 0.5


class FatalHelloError(ValueError):
    """An authentic hello, or a lack of descriptors, that keeps all ranks from starting."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(slots=True)
class _Candidate:
    wire: Wire
    challenge: bytes = field(default_factory=nonce)


class Candidates:
    """Accepts connections of ``listeners``, reads their hellos, and calls ``admit`` for each authentic one.

    ``poller`` is that of the owner, who calls :meth:`attend` for each ready descriptor. ``expected`` is the number of
    ranks that will come.
    """

    def __init__(
        self,
        end: LocalEnd,
        listeners: Listeners,
        poller: select.poll | select.epoll,
        expected: int,
        admit: Callable[[Peer], None],
    ) -> None:
        self._end = end
        self._listeners = listeners
        self._poller = poller
        self._admit = admit
        self._waiting: dict[int, _Candidate] = {}
        self._strangers = Strangers(expected, LEAST_CANDIDATES, MOST_CANDIDATES)
        self._lacking_since: float | None = None
        self._is_listening = False
        self._warnings = RareWarnings(logger)

    def close(self) -> None:
        """Close the connections."""
        for candidate in self._waiting.values():
            candidate.wire.sock.close()

    def shut_down(self) -> None:
        """End the connections, which :meth:`close` releases; from any thread."""
        for candidate in list(self._waiting.values()):
            with suppress(OSError):
                candidate.wire.sock.shutdown(socket.SHUT_RDWR)

    def next_look(self) -> float:
        """When :meth:`make_room` must be called at the latest, in monotonic seconds."""
        return min(self._end.attempt.deadline, self._strangers.next_look(time.monotonic()))

    def make_room(self) -> None:
        """Listen again where that is possible; close connections whose time is over, or where there are too many."""
        now = time.monotonic()
        in_the_way = self._strangers.in_the_way(now)
        if in_the_way and self._strangers.is_full:
            self.warn("one of too many unauthenticated connections", "; if it was a rank, raise the limit of ulimit -n")
        for descriptor in {*self._strangers.overdue(now), *in_the_way}:
            self._drop(descriptor)
        self._listen(self._strangers.may_accept(now))

    def attend(self, descriptor: int) -> None:
        """Accept a connection, or read from one. Raises the reason of a FatalHelloError."""
        try:
            if descriptor in self._listeners.by_descriptor:
                self._accept(descriptor)
            elif descriptor in self._waiting:
                self._hear(self._waiting[descriptor])
        except (OSError, HorovodInternalError, ValueError, TypeError) as error:
            if isinstance(error, FatalHelloError):
                raise error.reason from None
            if descriptor in self._waiting:
                _refuse(self._release(descriptor))
            self.warn("a connection", f": {error}")

    def warn(self, what: str, why: str) -> None:
        """Log a problem, unless there was one of its kind in the last minute."""
        self._warnings.warn("%s to rank %d was refused%s", what, self._end.hello.rank, why, kind=what)

    def _listen(self, may_listen: bool) -> None:
        if may_listen != self._is_listening:
            self._is_listening = may_listen
            for descriptor in self._listeners.by_descriptor:
                if may_listen:
                    self._poller.register(descriptor, select.POLLIN)
                else:
                    self._poller.unregister(descriptor)

    def _drop(self, descriptor: int) -> None:
        """Close a connection, unless its hello has come in the meantime."""
        self.attend(descriptor)
        if descriptor in self._waiting:
            self._release(descriptor).close()

    def _release(self, descriptor: int) -> socket.socket:
        self._poller.unregister(descriptor)
        self._strangers.discard(descriptor)
        return self._waiting.pop(descriptor).wire.sock

    def _accept(self, descriptor: int) -> None:
        try:
            sock = self._strangers.next_from(self._listeners.by_descriptor[descriptor], time.monotonic())
        except OSError as error:
            if not descriptors.are_exhausted(error):
                raise
            self._await_descriptors(error)
            return
        if sock is not None:
            self._lacking_since = None
            candidate = self._waiting[sock.fileno()] = _Candidate(Wire(sock, self._end.attempt, LONGEST_HELLO))
            self._poller.register(sock, select.POLLIN)
            end_in_silence(sock, self._end.heartbeat)
            sock.send(self._listeners.entry["id"].encode() + candidate.challenge, socket.MSG_NOSIGNAL)

    def _await_descriptors(self, error: OSError) -> None:
        """No descriptor is left: silent connections are closed.

        Without any connection to close, the lack ends the start of all ranks after some time.
        """
        self.warn("a connection", f": {descriptors.EXHAUSTED}")
        if self._waiting:
            return
        now = time.monotonic()
        self._lacking_since = self._lacking_since or now
        if now > self._lacking_since + LACK_SECONDS:
            raise FatalHelloError(error)

    def _hear(self, candidate: _Candidate) -> None:
        frame = candidate.wire.read()
        if frame is None:
            return
        hello, nonce, listener = unpack_hello(unseal(self._end.secret, candidate.challenge, frame))
        if listener != self._listeners.entry["id"]:
            raise PeerLostError("the hello was meant for another process, which listened at this address before")
        sock = self._release(candidate.wire.sock.fileno())
        self._admit(Peer(Wire(sock, self._end.attempt), hello, nonce, self._end.secret))


def _refuse(sock: socket.socket) -> None:
    """Close a connection that is not wanted. One that is closed without a refusal may be dialled again."""
    with suppress(OSError):
        sock.send(REFUSAL, socket.MSG_NOSIGNAL)
    sock.close()
