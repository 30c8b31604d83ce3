"""The line from a task to the driver: the output of its worker, and the news that one of the two is gone.

The driver sends a nonce; the task answers with one frame, who it is under an HMAC of the job's secret, and the driver
accepts or refuses in one byte. From then on the task sends frames: a byte that says what it is, then data. Each side
takes the end of the connection for the end of the other, unless the task has said goodbye. Frames of output are not
authenticated: they are shown to a person and do nothing. The frame of a failure is unpickled, and has an HMAC.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from collectives.control.sockets import end_in_silence
from collectives.retries import attempts
from executors.api import JobSecret
from executors.local.frames import Frames
from executors.local.output import Sink

__all__ = [
    "ACCEPTED",
    "FAILURE",
    "GOODBYE",
    "NONCE_BYTES",
    "REFUSED",
    "SILENCE_SECONDS",
    "STREAMS",
    "WARNING",
    "Caller",
    "Line",
    "dial",
    "sealed",
    "unsealed",
]

NONCE_BYTES = 32
DIGEST_BYTES = 32
ACCEPTED, REFUSED = b"+", b"-"
STREAMS = {"stdout": b"o", "stderr": b"e"}
GOODBYE = b"."
FAILURE = b"f"
WARNING = b"w"
LONGEST_FRAME = 1 << 20
DIAL_SECONDS = 5.0
# A driver with hundreds of tasks may be slow to take a call; one behind a firewall never does.
REACH_SECONDS = 15.0
# A driver that takes nothing for so long, or whose host is silent, is gone.
SILENCE_SECONDS = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dials: the task of ``rank`` on the host that a person calls ``host_name``."""

    rank: int
    host: str
    host_name: str

    def seal(self, secret: JobSecret, nonce: bytes) -> bytes:
        """What the task answers to ``nonce``."""
        return sealed(secret, nonce, json.dumps(asdict(self)).encode())

    @classmethod
    def unseal(cls, secret: JobSecret, nonce: bytes, data: bytes) -> Caller:
        """Who made ``data``. Raises PermissionError for somebody who does not know ``secret``."""
        return cls(**json.loads(unsealed(secret, nonce, data)))


def sealed(secret: JobSecret, nonce: bytes, data: bytes) -> bytes:
    """``data`` behind its HMAC."""
    return _digest(secret, nonce, data) + data


def unsealed(secret: JobSecret, nonce: bytes, data: bytes) -> bytes:
    """What was :func:`sealed`. Raises PermissionError where somebody did that who does not know ``secret``."""
    digest, text = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(secret, nonce, text)):
        raise PermissionError("the caller does not know the secret of the job")
    return text


def _digest(secret: JobSecret, nonce: bytes, text: bytes) -> bytes:
    return hmac.new(secret.key, nonce + text, hashlib.sha256).digest()


class Line:
    """An accepted connection. Threads may share it, until it is closed."""

    def __init__(self, sock: socket.socket, secret: JobSecret, nonce: bytes) -> None:
        self._socket = sock
        self._secret = secret
        self._nonce = nonce
        self._sending = threading.Lock()  # owner: the thread that sends a frame; bound and abort: those of send()

    def fileno(self) -> int:
        """The descriptor, which can be read when the driver is gone: it never says anything."""
        return self._socket.fileno()

    @property
    def lost(self) -> bool:
        """Whether the driver is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def sink(self, rank: int, name: str) -> Sink:
        """See :class:`executors.local.output.Sinks`."""
        return _LineSink(self, STREAMS[name])

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send a frame. Where the driver is gone, nobody is told: :attr:`lost` is."""
        message = kind + data
        # Bound: SILENCE_SECONDS without progress, by the kernel; abort: the driver hangs up.
        try:
            with self._sending:
                self._socket.sendall(Frames.header(message) + message)
        except OSError:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def warn(self, text: str) -> None:
        """Let the driver log a warning."""
        self.send(WARNING, text.encode())

    def report(self, failure: bytes) -> None:
        """Tell the driver of a pickled :class:`.Outcome` before Spark does; not of one that is too long for a frame."""
        if len(failure) < LONGEST_FRAME - DIGEST_BYTES:
            self.send(FAILURE, sealed(self._secret, self._nonce, failure))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class _LineSink:
    def __init__(self, line: Line, kind: bytes) -> None:
        self._line = line
        self._kind = kind

    def feed(self, data: bytes) -> None:
        self._line.send(self._kind, data)

    def close(self) -> None:
        """The line is closed by whoever dialled it."""


def dial(addresses: Sequence[str], port: int, secret: JobSecret, caller: Caller) -> Line | None:
    """The line to the driver at one of ``addresses``; None where it cannot be reached, which is logged.

    Tries for REACH_SECONDS, with DIAL_SECONDS for each wait. Raises ConnectionRefusedError where the driver knows
    another task of this rank, or ends.
    """
    problems: dict[str, str] = {}
    for _ in attempts(REACH_SECONDS):
        for address in addresses:
            try:
                sock = socket.create_connection((address, port), DIAL_SECONDS)
            except OSError as error:
                problems[address] = f"the driver cannot be reached at {address} port {port} ({error})"
                continue
            try:
                return _introduce(sock, secret, caller)
            except ConnectionRefusedError:
                sock.close()
                raise
            except OSError as error:
                sock.close()
                problems[address] = f"{address} port {port} is not the driver ({error})"
    for problem in problems.values():
        logger.warning(problem)
    return None


def _introduce(sock: socket.socket, secret: JobSecret, caller: Caller) -> Line:
    nonce = _receive(sock, NONCE_BYTES)
    message = caller.seal(secret, nonce)
    sock.sendall(Frames.header(message) + message)
    if _receive(sock, 1) != ACCEPTED:
        raise ConnectionRefusedError(f"the driver knows another task of rank {caller.rank}, or ends")
    end_in_silence(sock, SILENCE_SECONDS)
    sock.settimeout(None)
    return Line(sock, secret, nonce)


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionAbortedError("it hung up")
        data += piece
    return data
