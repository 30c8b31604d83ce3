"""The connections to a listening rank that are not authenticated yet.

:mod:`collectives.reception.strangers` limits their number and time. A stranger, silent or talkative, cannot delay or
end the job.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from collectives import descriptors
from collectives.api import HorovodInternalError, PeerLostError
from collectives.control.handshake.frames import REFUSAL, FrameReader, nonce, unseal
from collectives.control.handshake.hello import Hello, LocalEnd, unpack_hello
from collectives.control.handshake.listeners import Listeners
from collectives.control.sockets import end_in_silence
from collectives.reception.rare_warnings import RareWarnings
from collectives.reception.strangers import Strangers

__all__ = ["MOST_CANDIDATES", "Candidates", "FatalHelloError"]

logger = logging.getLogger(__name__)

HELLO_BYTES = 1 << 16
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
    sock: socket.socket
    challenge: bytes = field(default_factory=nonce)
    reader: FrameReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = FrameReader(self.sock, HELLO_BYTES)


class Candidates:
    """Accepts connections of ``listeners``, reads their hellos, and calls ``admit`` for each authentic one.

    ``admit`` gets the connection, the hello, and the nonce that its sender expects in the answers. ``poller`` is that
    of the owner, who calls :meth:`attend` for each ready descriptor. ``expected`` is the number of ranks that will
    come.
    """

    def __init__(
        self,
        end: LocalEnd,
        listeners: Listeners,
        poller: select.poll,
        expected: int,
        admit: Callable[[socket.socket, Hello, bytes], None],
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
            candidate.sock.close()

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
            if descriptor in self._listeners.descriptors:
                self._accept(descriptor)
            elif descriptor in self._waiting:
                self._hear(self._waiting[descriptor])
        except (OSError, HorovodInternalError, ValueError, TypeError) as error:
            if isinstance(error, FatalHelloError):
                raise error.reason from None
            if descriptor in self._waiting:
                _refuse(self._release(descriptor).sock)
            self.warn("a connection", f": {error}")

    def warn(self, what: str, why: str) -> None:
        """Log a problem, unless there was one of its kind in the last minute."""
        self._warnings.warn("%s to rank %d was refused%s", what, self._end.hello.rank, why, kind=what)

    def _listen(self, may_listen: bool) -> None:
        if may_listen != self._is_listening:
            self._is_listening = may_listen
            for descriptor in self._listeners.descriptors:
                if may_listen:
                    self._poller.register(descriptor, select.POLLIN)
                else:
                    self._poller.unregister(descriptor)

    def _drop(self, descriptor: int) -> None:
        """Close a connection, unless its hello has come in the meantime."""
        self.attend(descriptor)
        if descriptor in self._waiting:
            self._release(descriptor).sock.close()

    def _release(self, descriptor: int) -> _Candidate:
        self._poller.unregister(descriptor)
        self._strangers.discard(descriptor)
        return self._waiting.pop(descriptor)

    def _accept(self, descriptor: int) -> None:
        try:
            sock = self._listeners.accept(descriptor)
        except OSError as error:
            if not descriptors.are_exhausted(error):
                raise
            if not descriptors.raise_limit():
                self._pause(error)
            return
        if sock is not None:
            descriptors.make_room_after(sock.fileno())
            self._lacking_since = None
            candidate = self._waiting[sock.fileno()] = _Candidate(sock)
            self._strangers.add(sock.fileno(), time.monotonic())
            self._poller.register(sock, select.POLLIN)
            end_in_silence(sock, self._end.heartbeat)
            sock.send(self._listeners.entry["id"].encode() + candidate.challenge, socket.MSG_NOSIGNAL)

    def _pause(self, error: OSError) -> None:
        """No descriptor is left: accept no other for a while, in which silent connections are closed.

        Without any connection to close, the lack ends the start of all ranks after some time.
        """
        self.warn("a connection", f": {descriptors.EXHAUSTED}")
        now = time.monotonic()
        self._strangers.pause(now)
        if self._waiting:
            return
        self._lacking_since = self._lacking_since or now
        if now > self._lacking_since + LACK_SECONDS:
            raise FatalHelloError(error)

    def _hear(self, candidate: _Candidate) -> None:
        frame = candidate.reader.read()
        if frame is None:
            return
        hello, nonce, listener = unpack_hello(unseal(self._end.secret, candidate.challenge, frame))
        if listener != self._listeners.entry["id"]:
            raise PeerLostError("the hello was meant for another process, which listened at this address before")
        self._admit(self._release(candidate.sock.fileno()).sock, hello, nonce)


def _refuse(sock: socket.socket) -> None:
    """Close a connection that is not wanted. One that is closed without a refusal may be dialled again."""
    with suppress(OSError):
        sock.send(REFUSAL, socket.MSG_NOSIGNAL)
    sock.close()
