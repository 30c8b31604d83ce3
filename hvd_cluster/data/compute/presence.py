"""Which processes of a compute service live: each holds a connection to the service, and sends a word now and then.

The frames are those of :mod:`collectives.net.frames`, so each proves that its sender knows the secret. A process that
ends without a farewell, or that is silent for longer than it promised, is lost.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgpack

from collectives import Opener, Sealer, end_in_silence, frames, interfaces, wire
from executors import STOP_SECONDS, ExecutorError, JobSecret, Reception, ServerThread

__all__ = [
    "END",
    "PLAN",
    "Presence",
    "PresenceServer",
    "address",
    "claims",
    "complete",
    "free",
    "users",
    "worker",
    "workers",
]

PLAN = "plan"
"""The numbers of dispatchers and of workers for each, and the port of the presence server."""
END = "end"
"""Empty after an orderly shutdown, else the reason of the end."""


def claims(dispatcher: int) -> str:
    """Counts the registrations of a dispatcher; the first of them sets the address."""
    return f"dispatchers/{dispatcher}/claims"


def address(dispatcher: int) -> str:
    """The address of a dispatcher, ``host:port``."""
    return f"dispatchers/{dispatcher}/address"


def worker(dispatcher: int, number: int) -> str:
    """Counts the registrations of one worker; only the first of them counts for all."""
    return f"dispatchers/{dispatcher}/workers/{number}"


def workers(dispatcher: int) -> str:
    """Counts the workers of a dispatcher."""
    return f"dispatchers/{dispatcher}/registered"


def complete(dispatcher: int) -> str:
    """Exists once a dispatcher has all its workers."""
    return f"dispatchers/{dispatcher}/complete"


def users(dispatcher: int) -> str:
    """Counts the processes that read from a dispatcher."""
    return f"dispatchers/{dispatcher}/users"


def free(dispatcher: int) -> str:
    """Exists once the last reader has left a dispatcher."""
    return f"dispatchers/{dispatcher}/free"


HELLO_SECONDS = 10.0
READ_BYTES = 1 << 12
WORDS_IN_SILENCE = 4
"""How many words a process sends in the time after which its silence is a loss."""
FAREWELL = b"farewell"
WORD = b""
REFUSED = "the compute service has refused this process: they have different secrets"


class _Member(NamedTuple):
    """A process: its name in errors, and the seconds after which its silence is a loss."""

    name: str
    silence: float

    def encode(self) -> bytes:
        return bytes(msgpack.packb(tuple(self)))

    @classmethod
    def decode(cls, content: bytes) -> _Member:
        name, silence = msgpack.unpackb(content)
        return cls(str(name), float(silence))


class PresenceServer:
    """Calls ``on_loss``, in its thread, with one sentence for each process that is lost.

    Owns the daemon thread "hvd-presence", from :meth:`start` to :meth:`stop`.
    """

    def __init__(self, secret: JobSecret, on_loss: Callable[[str], object]) -> None:
        self._secret = secret
        self._on_loss = on_loss
        self._members = 0
        # Held for moments. Bound of a wait for a change of the above: the seconds that its caller gives.
        self._changed = threading.Condition()
        self._reception = Reception("the compute service", self._attend)
        self._thread = ServerThread("hvd-presence", self._reception.serve)

    def start(self) -> int:
        """Listen on all addresses of this host, and return the port. Raises ExecutorError."""
        host = interfaces.everywhere()
        try:
            listener = interfaces.listen(host)
        except OSError as error:
            raise ExecutorError(f"the compute service cannot listen on {host} ({error})") from error
        port: int = listener.getsockname()[1]
        self._thread.start(listener)
        return port

    def wait_until_empty(self, seconds: float) -> bool:
        """Whether all processes have left, or are lost, within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._members, seconds)

    def stop(self) -> None:
        """Close all connections, which is no loss of their processes, and end the thread. Any number of times."""
        with suppress(RuntimeError):  # the loop is closed: it was stopped before
            self._thread.stop(2 * STOP_SECONDS)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            member, opener, sealer = await self._introduce(reader, writer)
        except (OSError, EOFError, ValueError, TypeError) as error:
            self._reception.warn(
                "a connection to the compute service came from a process that is not one of its (%s)", error
            )
            return
        self._count(1)
        try:
            writer.write(sealer.seal(WORD))  # only now: a process that has the word is waited for at the end
            loss = await self._listen_to(member, opener, reader)
            if loss:
                self._on_loss(f"{member.name} {loss}")
        finally:
            self._count(-1)

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[_Member, Opener, Sealer]:
        hello, opener, sealer = await frames.admit(reader, writer, self._secret.key)
        member = _Member.decode(hello)
        self._reception.authenticated(writer)
        end_in_silence(writer.get_extra_info("socket"), member.silence)
        return member, opener, sealer

    async def _listen_to(self, member: _Member, opener: Opener, reader: asyncio.StreamReader) -> str:
        """The loss of ``member`` as the end of a sentence; empty if it has left in order."""
        try:
            while data := await asyncio.wait_for(reader.read(READ_BYTES), member.silence):
                if FAREWELL in opener.feed(data):
                    return ""
        except asyncio.TimeoutError:
            return f"has been silent for {member.silence:g} s"
        except OSError as error:  # also that of a forged frame
            return f"is lost: its connection to the compute service broke ({error})"
        return "has died"

    def _count(self, change: int) -> None:
        with self._changed:
            self._members += change
            self._changed.notify_all()


class Presence:
    """Shows the service at ``address`` that this process, ``name``, lives, from now until :meth:`close`.

    The service counts a silence of ``silence`` seconds as a loss. Owns the daemon thread "hvd-presence-of". Raises
    OSError if the service cannot be reached, and PermissionError if it does not know the secret.
    """

    def __init__(self, address: str, port: int, secret: JobSecret, name: str, silence: float) -> None:
        self._pause = silence / WORDS_IN_SILENCE
        self._left = threading.Event()
        # Bound of each call on it: HELLO_SECONDS.
        self._socket = socket.create_connection((address, port), HELLO_SECONDS)
        try:
            self._sealer = self._introduce(secret, _Member(name, silence))
        except BaseException:
            self._socket.close()
            raise
        # Ended and joined by close(), which it follows within HELLO_SECONDS.
        self._thread = threading.Thread(target=self._speak, name="hvd-presence-of", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say farewell. Any number of times."""
        self._left.set()
        self._thread.join(2 * HELLO_SECONDS)

    def _introduce(self, secret: JobSecret, member: _Member) -> Sealer:
        sealer, opener = wire.introduce(self._socket, secret.key, member.encode(), REFUSED)
        opener.open(wire.receive_frame(self._socket, REFUSED))
        return sealer

    def _speak(self) -> None:
        # The end of the service is seen by those who wait for it, not here.
        with self._socket, suppress(OSError):
            while not self._left.wait(self._pause):
                self._socket.sendall(self._sealer.seal(WORD))
            self._socket.sendall(self._sealer.seal(FAREWELL))
