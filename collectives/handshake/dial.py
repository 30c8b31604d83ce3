"""A call to the listener of another rank, repeated as long as it makes sense, and the answers of that rank."""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError
from collectives.handshake.hello import (
    QUESTION,
    LocalEnd,
    pack_answer,
    pack_farewell,
    pack_hello,
    unpack_answer,
)
from collectives.net import descriptors
from collectives.net.attempts import ConnectAttempt, attempts
from collectives.net.frames import NONCE_BYTES, nonce, seal, unseal
from collectives.net.interfaces import family_of
from collectives.net.sockets import end_in_silence
from collectives.net.wire import Wire

logger = logging.getLogger(__name__)


REASON_SECONDS = 0.5
"""How long a rank that gives up waits for the other rank's reason, in seconds."""


def pack_reason(error: BaseException) -> bytes:
    """The reason of a rank that leaves while the other rank waits for its answers."""
    return pack_answer(None, error)


class BrokenCallError(PeerLostError):
    """The connection broke before the first answer. A listener that is still there can be called again, in time."""


class NoListenerError(PeerLostError):
    """Nobody, or another process, listens at the address of the rank: it has ended, or is in another start."""


class GoneError(PeerLostError):
    """The connection broke before the first answer, and nobody listens at the address any more: the rank has ended."""


class Callee:
    """Rank ``host`` at the other end of ``wire``. Raises the errors of the attempt and of the other rank."""

    def __init__(self, end: LocalEnd, host: int, wire: Wire) -> None:
        self.sock = wire.sock
        self.host = host
        self._end = end
        self._wire = wire
        self._nonce = nonce()

    def greet(self, entry: Mapping[str, Any]) -> Any:
        """Prove knowledge of the secret, and describe this rank; returns the first answer of the listener ``entry``.

        Raises BrokenCallError, and NoListenerError where another process listens.
        """
        rank, host = self._end.hello.rank, self.host
        try:
            self._send_hello(entry)
            return self._told()
        except (ConnectionResetError, BrokenPipeError) as error:
            text = f"rank {rank}: the connection to rank {host} broke before it was answered: {error}"
            raise BrokenCallError(text, [host]) from error
        except OSError as error:
            raise self._lost(error) from error

    def _send_hello(self, entry: Mapping[str, Any]) -> None:
        rank, host = self._end.hello.rank, self.host
        try:
            if not self._wire.matches(entry["id"].encode()):
                raise NoListenerError(f"another process listens at {entry['tcp']}, the address of rank {host}", [host])
            challenge = self._wire.exactly(NONCE_BYTES)
            self._wire.send(seal(self._end.secret, challenge, pack_hello(self._end.hello, self._nonce, entry["id"])))
        except TimeoutError as error:
            text = f"rank {rank}: rank {host} was reached, but did not answer in time; its process may be stopped"
            raise CollectiveTimeoutError(text, [host]) from error

    @contextmanager
    def hearing_errors(self, pack: Callable[[BaseException], bytes] = pack_reason) -> Iterator[None]:
        """Send the other rank the error that ends the block, packed by ``pack``."""
        try:
            yield
        except BaseException as error:
            reason = descriptors.explained(error, self._end.hello.rank)
            self._leave(pack(reason))
            if reason is error:
                raise
            raise reason from error

    @contextmanager
    def consulting(self) -> Iterator[None]:
        """Like :meth:`hearing_errors`; replaces a loss or a delay by the reason that the other rank then sends."""
        try:
            with self.hearing_errors():
                yield
        except (PeerLostError, CollectiveTimeoutError) as error:
            reason = self._final_reason(error)
            if reason is error:
                raise
            raise reason from error

    @property
    def has_answer(self) -> bool:
        """Whether :meth:`answer` need not wait."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN | select.POLLRDHUP)
        return bool(poller.poll(0))

    def send(self, data: bytes) -> None:
        """Send a frame. The next :meth:`answer` reports a broken connection."""
        with suppress(ConnectionError):
            self._wire.send(data)

    def answer(self) -> Any:
        """The next answer of the other rank; raises the error that it contains."""
        try:
            return self._next()
        except OSError as error:
            raise self._lost(error) from error

    def told(self) -> Any:
        """As :meth:`answer`; replies to questions of the other rank before, whether this one runs."""
        try:
            return self._told()
        except OSError as error:
            raise self._lost(error) from error

    def _told(self) -> Any:
        while (answer := self._next()) is QUESTION:
            self.send(pack_answer(None))
        return answer

    def _lost(self, error: OSError) -> PeerLostError:
        rank, host = self._end.hello.rank, self.host
        return PeerLostError(f"rank {rank}: the connection to rank {host} broke: {error}", [host])

    def _next(self) -> Any:
        try:
            return self._read()
        except TimeoutError as error:
            raise self._reason_for_being_late() from error
        except OSError:
            raise
        except BaseException as error:
            self._leave(pack_farewell(error))
            raise

    def _read(self) -> Any:
        return unpack_answer(self._content())

    def _content(self) -> bytes:
        sealed = self._wire.receive()
        try:
            return unseal(self._end.secret, self._nonce, sealed)
        except PermissionError as error:
            raise PeerLostError(f"{error}, or refused this rank") from error

    def _reason_for_being_late(self) -> Exception:
        """Time is over. Only the other rank knows the missing ranks: tell it, and wait a moment for its reason."""
        rank, host = self._end.hello.rank, self.host
        text = f"rank {rank}: rank {host} did not report the missing ranks in time; its process may be stopped"
        late = CollectiveTimeoutError(text, [host])
        self._leave(pack_farewell(late))
        return self._final_reason(late)

    def _final_reason(self, own: Exception) -> Exception:
        """The reason of the other rank for the end, if it sends one soon; or that of this rank."""
        try:
            with suppress(OSError), ConnectAttempt(REASON_SECONDS) as self._wire.attempt:
                while True:
                    self._read()  # an answer without an error was sent before the other rank knew
        except (HorovodInternalError, SettingsError) as reason:
            return reason
        return own

    def _leave(self, reason: bytes) -> None:
        """Send the other rank the packed reason why this one leaves."""
        with suppress(OSError, HorovodInternalError):
            self.send(reason)
            self.sock.shutdown(socket.SHUT_WR)


RETRY_SECONDS = 0.02


def dial(end: LocalEnd, entry: Mapping[str, Any], host: int) -> Wire:
    """A connection to the listener of rank ``host``; ConnectionRefusedError where it no longer listens."""
    if entry.get("host") == end.hello.host:
        try:
            return _open(end, socket.AF_UNIX, entry["unix"])
        except OSError as error:
            _check_descriptors(error, end.hello.rank)
            logger.debug("rank %d is on this host, but in another network namespace or gone; using TCP", host)
    while True:
        try:
            return _open(end, family_of(entry["tcp"][0]), tuple(entry["tcp"]))
        except ConnectionRefusedError:
            raise
        except OSError as error:
            _check_descriptors(error, end.hello.rank)
            if not end.attempt.remaining:
                raise PeerLostError(f"rank {host} does not answer at {entry['tcp']}: {error}", [host]) from error
            end.attempt.wait({}, RETRY_SECONDS)


def _check_descriptors(error: OSError, rank: int) -> None:
    """Raise HorovodInternalError where ``error`` is no fault of the other rank: ``rank`` has no descriptor left."""
    if descriptors.are_exhausted(error):
        raise descriptors.explained(error, rank) from error


def _open(end: LocalEnd, family: int, address: Any) -> Wire:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _finish(sock, sock.connect_ex(address), end.attempt)
        end_in_silence(sock, end.heartbeat)
    except BaseException:
        sock.close()
        raise
    return Wire(sock, end.attempt)


def _finish(sock: socket.socket, problem: int, attempt: ConnectAttempt) -> None:
    """Wait for a connection that is under way; OSError where it fails."""
    if problem == errno.EINPROGRESS:
        if not attempt.wait({sock.fileno(): select.POLLOUT}):
            raise TimeoutError("no answer in time")
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, errno.errorcode.get(problem, "unknown error"))


LOOK_SECONDS = 1.0
"""How long the process at an address may be silent before :func:`call` looks for another reason to end."""


MakeCallee: TypeAlias = Callable[[LocalEnd, int, Wire], Callee]


def call(
    end: LocalEnd,
    entry: Mapping[str, Any],
    host: int,
    pause: Callable[[float], object],
    make: MakeCallee = Callee,
) -> tuple[Callee, Any]:
    """Rank ``host``, which listens at ``entry`` and has admitted this rank, and its first answer.

    A listener drops silent connections where it has too many, and this rank may be slow: a connection that breaks
    before the answer is made again. ``pause`` waits some seconds, and may raise to end the call. ``make`` makes the
    callee. Raises the errors of :meth:`Callee.greet`, GoneError, and NoListenerError if nobody listens and no
    connection broke.
    """
    broken: BrokenCallError | None = None
    for _ in attempts(end.attempt.remaining, pause):
        try:
            return _try(end, entry, host, pause, make)
        except BrokenCallError as error:
            broken = BrokenCallError(str(error), error.ranks)
        except NoListenerError as error:
            if broken is None:
                raise
            raise GoneError(str(broken), broken.ranks) from error
    assert broken is not None
    raise broken


def _try(
    end: LocalEnd, entry: Mapping[str, Any], host: int, pause: Callable[[float], object], make: MakeCallee
) -> tuple[Callee, Any]:
    try:
        wire = dial(end, entry, host)
    except ConnectionRefusedError as error:
        raise NoListenerError(f"rank {host} does not answer at {entry['tcp']}", [host]) from error
    try:
        while not end.attempt.wait({wire.sock.fileno(): select.POLLIN}, LOOK_SECONDS) and end.attempt.remaining:
            pause(0.0)
        callee = make(end, host, wire)
        return callee, callee.greet(entry)
    except BaseException:
        wire.sock.close()
        raise
