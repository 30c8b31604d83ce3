"""The connection from a task to the driver: carries the output of the worker, and shows when one of the two ends.

The driver sends a nonce. The task answers with one frame: its identity, under an HMAC of the job's secret. The driver
accepts or refuses in one byte. From then on the task sends frames: one byte for the kind, then data. Each side takes
the end of the connection for the end of the other side, unless the task has sent GOODBYE. Frames of output and warnings
are not authenticated, because they are only shown. The frame of a failure is unpickled, so it has an HMAC. An outcome
comes in frames of RESULT and ends with one of RESULT_END, which has the HMAC of all. The driver answers it in one byte.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from collectives import attempts, end_in_silence, frames, wire
from executors.api import JobSecret
from executors.job.output import Sink

ACCEPTED, REFUSED = b"+", b"-"
STREAMS = {"stdout": b"o", "stderr": b"e"}
GOODBYE = b"."
FAILURE = b"f"
WARNING = b"w"
RESULT = b"r"
RESULT_END = b"R"
LONGEST_FRAME = 1 << 20
RESULT_BYTES = LONGEST_FRAME // 2
CLOSED = "it closed the connection"
DIAL_SECONDS = 5.0
# A driver with hundreds of tasks may be slow to accept; one behind a firewall never accepts.
REACH_SECONDS = 15.0
# A driver that reads nothing for this time, or that is on a silent host, counts as gone.
SILENCE_SECONDS = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """The task of ``rank``, on ``host``, which has the name ``host_name``."""

    rank: int
    host: str
    host_name: str

    def seal(self, secret: JobSecret, nonce: bytes) -> bytes:
        """The answer of the task to ``nonce``."""
        return frames.seal(secret.key, nonce, json.dumps(asdict(self)).encode())

    @classmethod
    def unseal(cls, secret: JobSecret, nonce: bytes, data: bytes) -> TaskIdentity:
        """The identity in ``data``. Raises PermissionError if its author does not know ``secret``."""
        return cls(**json.loads(frames.unseal(secret.key, nonce, data)))


class DriverConnection:
    """An accepted connection. Threads may share it, until it is closed."""

    def __init__(self, sock: socket.socket, secret: JobSecret, nonce: bytes) -> None:
        self._socket = sock
        self._secret = secret
        self._nonce = nonce
        self._sending = threading.Lock()  # owner: the thread that sends a frame; bound and abort: those of send()

    def fileno(self) -> int:
        """The descriptor. Until :meth:`deliver` it becomes readable only when the driver is gone."""
        return self._socket.fileno()

    @property
    def lost(self) -> bool:
        """Whether the driver is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def sink(self, rank: int, name: str) -> Sink:
        return _OutputSink(self, STREAMS[name])

    def send(self, kind: bytes, data: bytes | memoryview = b"") -> None:
        """Send a frame. If the driver is gone, nothing is raised; :attr:`lost` becomes true."""
        # Bound: SILENCE_SECONDS without progress, by the kernel; abort: the driver hangs up.
        try:
            with self._sending:
                self._socket.sendall(frames.frame(kind + data))
        except OSError:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def warn(self, text: str) -> None:
        """Let the driver log a warning."""
        self.send(WARNING, text.encode())

    def report(self, failure: bytes) -> None:
        """Send a pickled :class:`.Outcome` to the driver before Spark does, unless it is too long for a frame."""
        if len(failure) < LONGEST_FRAME - frames.DIGEST_BYTES:
            self.send(FAILURE, frames.seal(self._secret.key, self._nonce, failure))

    def deliver(self, outcome: bytes) -> bool:
        """Send a pickled :class:`.Outcome` of any length. Returns whether the driver has all of it."""
        view = memoryview(outcome)
        for start in range(0, len(view), RESULT_BYTES):
            self.send(RESULT, view[start : start + RESULT_BYTES])
        self.send(RESULT_END, frames.digest(self._secret.key, self._nonce, outcome))
        # Bound: SILENCE_SECONDS of a host that is gone, by the kernel; abort: the driver hangs up.
        try:
            return self._socket.recv(1) == ACCEPTED
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class _OutputSink:
    def __init__(self, connection: DriverConnection, kind: bytes) -> None:
        self._connection = connection
        self._kind = kind

    def feed(self, data: bytes) -> None:
        self._connection.send(self._kind, data)

    def close(self) -> None:
        """Nothing: the owner of the connection closes it."""


def connect_to_driver(
    addresses: Sequence[str], port: int, secret: JobSecret, identity: TaskIdentity
) -> DriverConnection | None:
    """The connection to the driver at one of ``addresses``; None if it cannot be reached, which is logged.

    Tries for REACH_SECONDS, with DIAL_SECONDS for each attempt. Raises ConnectionRefusedError if the driver has another
    task of this rank, or is about to end.
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
                return _introduce(sock, secret, identity)
            except ConnectionRefusedError:
                sock.close()
                raise
            except OSError as error:
                sock.close()
                problems[address] = f"{address} port {port} is not the driver ({error})"
    for problem in problems.values():
        logger.warning(problem)
    return None


def _introduce(sock: socket.socket, secret: JobSecret, identity: TaskIdentity) -> DriverConnection:
    nonce = wire.receive(sock, frames.NONCE_BYTES, CLOSED)
    sock.sendall(frames.frame(identity.seal(secret, nonce)))
    if wire.receive(sock, 1, CLOSED) != ACCEPTED:
        raise ConnectionRefusedError(f"the driver has another task of rank {identity.rank}, or is about to end")
    end_in_silence(sock, SILENCE_SECONDS)
    sock.settimeout(None)
    return DriverConnection(sock, secret, nonce)
