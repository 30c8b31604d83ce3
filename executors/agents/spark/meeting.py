"""A task connects to the driver, and meets the other tasks of its stage there: see ``exchange`` for the driver's side.

Every message has a proof that its sender knows the secret of the job, because it decides where ranks connect.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence

from collectives import Opener, Sealer, attempts, end_in_silence, frames, wire
from executors.agents.spark.connection import (
    ACCEPTED,
    MEETING,
    REFUSED,
    SILENCE_SECONDS,
    DriverConnection,
    TaskHello,
    TaskIdentity,
)
from executors.agents.spark.exchange import BY_BARRIER, BY_DRIVER, TEXTS
from executors.api import JobSecret

SAY, IDENTIFY = b"s", b"i"
CLOSED = "it closed the connection"
DIAL_SECONDS = 5.0
# A driver with hundreds of tasks may be slow to accept; one behind a firewall never accepts.
REACH_SECONDS = 15.0
# After the first task has connected. Those that do not reach the driver are at Spark's barrier by then.
DECISION_SECONDS = REACH_SECONDS + 2.0

logger = logging.getLogger(__name__)


class TaskMeeting:
    """The meeting of the tasks by the ``connection`` of one of them. Only the main thread of the task uses it.

    The other methods raise ConnectionRefusedError if the driver is gone, is silent for ``seconds``, or has lost another
    task meanwhile. Then the stage cannot go on, and the caller must not wait for others.
    """

    def __init__(
        self, sock: socket.socket, connection: DriverConnection, keys: tuple[bytes, bytes], seconds: float
    ) -> None:
        self.connection = connection
        self._socket = sock
        self._sealer, self._opener = Sealer(keys[0]), Opener(keys[1])
        self._seconds = seconds

    def is_by_driver(self) -> bool:
        """Whether all tasks exchange their texts by :meth:`gather`; otherwise all do it by Spark's barrier."""
        return self._answer(BY_DRIVER, BY_BARRIER)[:1] == BY_DRIVER

    def gather(self, text: str) -> list[str]:
        """The texts of all tasks, by partition: the same as ``allGather`` of a BarrierTaskContext."""
        self._send(SAY + text.encode())
        texts: list[str] = json.loads(self._answer(TEXTS)[1:])
        return texts

    def identify(self, identity: TaskIdentity) -> bool:
        """Whether the driver accepts this task. It refuses one where it has another task of this rank."""
        self._send(IDENTIFY + identity.encode())
        return self._answer(ACCEPTED, REFUSED) == ACCEPTED

    def greeted(self) -> bool:
        """Whether the other side, which has got the hello, is the driver and goes on. Raises OSError."""
        return self._receive() == ACCEPTED

    def _send(self, content: bytes) -> None:
        self.connection.send(MEETING, self._sealer.seal(content))

    def _answer(self, *expected: bytes) -> bytes:
        # Owner: this task; bound: the seconds of the meeting; abort: the driver hangs up, or Spark kills this process.
        self._socket.settimeout(self._seconds)
        try:
            content = self._receive()
        except OSError as error:
            raise ConnectionRefusedError(f"the driver is gone, or was silent for too long ({error})") from error
        self._socket.settimeout(None)
        if content[:1] not in expected:
            raise ConnectionRefusedError("another task of this stage was lost while the tasks met")
        return content

    def _receive(self) -> bytes:
        return self._opener.open(wire.receive_frame(self._socket, CLOSED, wire.LONGEST_ANSWER))


def connect_to_driver(
    addresses: Sequence[str], port: int, secret: JobSecret, partition: int, seconds: float
) -> TaskMeeting | None:
    """The meeting at the driver, at one of ``addresses``; None if it cannot be reached, which is logged.

    Tries for REACH_SECONDS, with DIAL_SECONDS for each attempt. The driver decides in time, but for the ``seconds``
    that it may be silent. Raises ConnectionRefusedError if it is about to end.
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
                return _greet(sock, secret, TaskHello(partition), seconds)
            except ConnectionRefusedError:
                sock.close()
                raise
            except OSError as error:
                sock.close()
                problems[address] = f"{address} port {port} is not the driver ({error})"
    for problem in problems.values():
        logger.warning(problem)
    return None


def _greet(sock: socket.socket, secret: JobSecret, hello: TaskHello, seconds: float) -> TaskMeeting:
    nonce = wire.receive(sock, frames.NONCE_BYTES, CLOSED)
    sock.sendall(frames.frame(hello.seal(secret, nonce)))
    connection = DriverConnection(sock, secret, nonce)
    meeting = TaskMeeting(sock, connection, hello.keys(secret, nonce), seconds + DECISION_SECONDS)
    if not meeting.greeted():
        raise ConnectionRefusedError("the driver is about to end")
    end_in_silence(sock, SILENCE_SECONDS)
    return meeting
