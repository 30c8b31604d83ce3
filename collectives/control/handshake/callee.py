"""The rank that this rank has called, and its answers."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from collectives import descriptors
from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError
from collectives.attempt import ConnectAttempt
from collectives.control.handshake.frames import NONCE_BYTES, Wire, nonce, seal, unseal
from collectives.control.handshake.hello import LocalEnd, pack_answer, pack_farewell, pack_hello, unpack_answer

__all__ = ["BrokenCallError", "Callee", "GoneError", "NoListenerError"]

REASON_SECONDS = 0.5
"""How long a rank that gives up waits for the other rank's reason, in seconds."""


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
        self._end = end
        self._host = host
        self._wire = wire
        self._nonce = nonce()

    def greet(self, entry: Mapping[str, Any]) -> Any:
        """Prove knowledge of the secret, and describe this rank; returns the first answer of the listener ``entry``.

        Raises BrokenCallError, and NoListenerError where another process listens.
        """
        rank, host = self._end.hello.rank, self._host
        try:
            self._send_hello(entry)
            return self._next()
        except (ConnectionResetError, BrokenPipeError) as error:
            text = f"rank {rank}: the connection to rank {host} broke before it was answered: {error}"
            raise BrokenCallError(text, [host]) from error
        except OSError as error:
            raise self._lost(error) from error

    def _send_hello(self, entry: Mapping[str, Any]) -> None:
        rank, host = self._end.hello.rank, self._host
        try:
            if not self._wire.matches(entry["id"].encode()):
                raise NoListenerError(f"another process listens at {entry['tcp']}, the address of rank {host}", [host])
            challenge = self._wire.exactly(NONCE_BYTES)
            self._wire.send(seal(self._end.secret, challenge, pack_hello(self._end.hello, self._nonce, entry["id"])))
        except TimeoutError as error:
            text = f"rank {rank}: rank {host} was reached, but did not answer in time; its process may be stopped"
            raise CollectiveTimeoutError(text, [host]) from error

    @contextmanager
    def hearing_errors(self) -> Iterator[None]:
        """Send the other rank the error that ends the block."""
        try:
            yield
        except BaseException as error:
            reason = descriptors.explained(error, self._end.hello.rank)
            self._leave(pack_answer(None, reason))
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

    def _lost(self, error: OSError) -> PeerLostError:
        rank, host = self._end.hello.rank, self._host
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
        return unpack_answer(unseal(self._end.secret, self._nonce, self._wire.receive()))

    def _reason_for_being_late(self) -> Exception:
        """Time is over. Only the other rank knows the missing ranks: tell it, and wait a moment for its reason."""
        rank, host = self._end.hello.rank, self._host
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
