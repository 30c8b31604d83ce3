"""The connections to a listening rank that are not authenticated yet.

Any host on the network can connect. Therefore this module limits their number and reserves the descriptors of the job.
A stranger, silent or talkative, cannot delay or end the job.
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

__all__ = ["MOST_CANDIDATES", "Candidates", "FatalHelloError"]

logger = logging.getLogger(__name__)

HELLO_BYTES = 1 << 16
MOST_CANDIDATES = 64
LEAST_CANDIDATES = 4
SILENCE_SECONDS = 0.5
"""How long a connection may be silent while others wait for its place, in seconds."""
PAUSE_SECONDS = 0.1
LACK_SECONDS = 0.5


class FatalHelloError(ValueError):
    """An authentic hello, or a lack of descriptors, that keeps all ranks from starting."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(slots=True)
class _Candidate:
    sock: socket.socket
    since: float
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
        self._capacity = descriptors.share_of_strangers(expected, LEAST_CANDIDATES, MOST_CANDIDATES)
        self._paused_until = 0.0
        self._lacking_since: float | None = None
        self._is_listening = False
        self._warned: set[str] = set()

    def close(self) -> None:
        """Close the connections."""
        for candidate in self._waiting.values():
            candidate.sock.close()

    def next_look(self) -> float:
        """When there may be room again, in monotonic seconds."""
        if self._is_listening:
            return self._end.attempt.deadline
        full = len(self._waiting) >= self._capacity
        return self._oldest().since + SILENCE_SECONDS if full else self._paused_until

    def make_room(self) -> None:
        """Listen again where that is possible; close the oldest connection where there are too many."""
        now = time.monotonic()
        if len(self._waiting) >= self._capacity:
            self.warn("one of too many unauthenticated connections", "; if it was a rank, raise the limit of ulimit -n")
            if now >= self._oldest().since + SILENCE_SECONDS:
                self._drop_oldest()
        self._listen(len(self._waiting) < self._capacity and now >= self._paused_until)

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
        """Log each kind of problem once: a stranger must not fill the log."""
        level = logging.DEBUG if what in self._warned else logging.WARNING
        self._warned.add(what)
        logger.log(level, "%s to rank %d was refused%s", what, self._end.hello.rank, why)

    def _listen(self, may_listen: bool) -> None:
        if may_listen != self._is_listening:
            self._is_listening = may_listen
            for descriptor in self._listeners.descriptors:
                if may_listen:
                    self._poller.register(descriptor, select.POLLIN)
                else:
                    self._poller.unregister(descriptor)

    def _drop_oldest(self) -> None:
        """Close the oldest connection, unless its hello has come in the meantime."""
        descriptor = self._oldest().sock.fileno()
        self.attend(descriptor)
        if descriptor in self._waiting:
            self._release(descriptor).sock.close()

    def _oldest(self) -> _Candidate:
        return next(iter(self._waiting.values()))

    def _release(self, descriptor: int) -> _Candidate:
        self._poller.unregister(descriptor)
        return self._waiting.pop(descriptor)

    def _accept(self, descriptor: int) -> None:
        try:
            sock = self._listeners.accept(descriptor)
        except OSError as error:
            if not descriptors.are_exhausted(error):
                raise
            self._pause(error)
            return
        if sock is not None:
            self._lacking_since = None
            candidate = self._waiting[sock.fileno()] = _Candidate(sock, time.monotonic())
            self._poller.register(sock, select.POLLIN)
            end_in_silence(sock, self._end.heartbeat)
            sock.send(self._listeners.entry["id"].encode() + candidate.challenge, socket.MSG_NOSIGNAL)

    def _pause(self, error: OSError) -> None:
        """No descriptor is left: drop the oldest connection if it is silent, and accept no other for a while.

        Without any connection to drop, the lack ends the start of all ranks after some time.
        """
        self.warn("a connection", f": {descriptors.EXHAUSTED}")
        now = time.monotonic()
        self._paused_until = now + PAUSE_SECONDS
        if self._waiting:
            if now >= self._oldest().since + SILENCE_SECONDS:
                self._drop_oldest()
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
