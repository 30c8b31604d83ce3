"""The connection from a task to the driver: carries the output of the worker, and shows when one of the two ends.

The driver sends a nonce. The task answers with one frame: its hello, under an HMAC of the job's secret. Then the tasks
meet (``meeting``), and the driver accepts the rank of the task or refuses it. From then on only the task sends frames:
one byte for the kind, then data. Each side takes the end of the connection for the end of the other side, unless the
task has sent GOODBYE. Frames of output and warnings are not authenticated, because they are only shown. The frame of a
failure is unpickled, so it has an HMAC. An outcome comes in frames of RESULT and ends with one of RESULT_END, which has
the HMAC of all. The driver answers it in one byte. Frames of the meeting have the HMAC of a key of the connection.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from collectives import frames
from executors.api import JobSecret
from executors.job.output import Sink

ACCEPTED, REFUSED = b"+", b"-"
STREAMS = {"stdout": b"o", "stderr": b"e"}
GOODBYE = b"."
FAILURE = b"f"
WARNING = b"w"
RESULT = b"r"
RESULT_END = b"R"
MEETING = b"m"
LONGEST_FRAME = 1 << 20
RESULT_BYTES = LONGEST_FRAME // 2
# A driver that reads nothing for this time, or that is on a silent host, counts as gone.
SILENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """The task of ``rank``, on ``host``, which has the name ``host_name``."""

    rank: int
    host: str
    host_name: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> TaskIdentity:
        """The reverse of :meth:`encode`."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class TaskHello:
    """The first frame of the task of ``partition``, whose rank is not known yet; ``nonce`` is its own, in hex."""

    partition: int
    nonce: str = field(default_factory=lambda: frames.nonce().hex())

    def seal(self, secret: JobSecret, nonce: bytes) -> bytes:
        """The answer of the task to the ``nonce`` of the driver."""
        return frames.seal(secret.key, nonce, json.dumps(asdict(self)).encode())

    @classmethod
    def unseal(cls, secret: JobSecret, nonce: bytes, data: bytes) -> TaskHello:
        """The hello in ``data``. Raises PermissionError if its author does not know ``secret``."""
        return cls(**json.loads(frames.unseal(secret.key, nonce, data)))

    def keys(self, secret: JobSecret, nonce: bytes) -> tuple[bytes, bytes]:
        """The keys for the frames of the meeting: those of the task, and those of the driver."""
        return frames.keys(secret.key, bytes.fromhex(self.nonce), nonce)


class DriverConnection:
    """A connection to the driver. Threads may share it, until it is closed."""

    def __init__(self, sock: socket.socket, secret: JobSecret, nonce: bytes) -> None:
        self._socket = sock
        self._secret = secret
        self._nonce = nonce
        self._sending = threading.Lock()  # owner: the thread that sends a frame; bound and abort: those of send()

    def fileno(self) -> int:
        """The descriptor. From the meeting to :meth:`deliver` it becomes readable only when the driver is gone."""
        return self._socket.fileno()

    @property
    def lost(self) -> bool:
        """Whether the driver is gone; of use after the meeting of the tasks."""
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
