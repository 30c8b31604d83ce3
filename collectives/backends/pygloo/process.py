"""The helper process of a group, as its rank sees it."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from collectives.backends.pygloo.helper import PROGRAM, SharedMemory

_alive: weakref.WeakSet[Helper] = weakref.WeakSet()


class Helper:
    """A process that runs :mod:`collectives.backends.pygloo.helper`; it ends with this one, whatever happens to either.

    Owned by one bootstrap or transport, which calls :meth:`close`. :meth:`kill` is safe from any thread; the other
    methods are for the thread that does the operations.
    """

    def __init__(self) -> None:
        self._shared = SharedMemory.create()
        ours, theirs = socket.socketpair()
        far, self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._line = Connection(ours.detach())
        # Owned by this object; held for a few instructions, or until a killed process is gone. A signal handler may
        # kill while its thread has it.
        self._lock = threading.RLock()
        self._is_closed = False
        self._sockets: frozenset[str] = frozenset()
        inherited = theirs.fileno(), self._shared.descriptor, far
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", PROGRAM, *map(str, inherited), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
            )
        except BaseException:
            self._release()
            raise
        finally:
            theirs.close()
            os.close(far)
        _alive.add(self)

    def memory(self, nbytes: int) -> mmap.mmap:
        """The memory that both processes share, with at least ``nbytes``."""
        return self._shared.grow(nbytes)

    def tell(self, *words: Any) -> None:
        """Send a message. Raises OSError when the process has ended."""
        self._line.send_bytes(msgpack.packb(words))

    def hear(self) -> list[Any]:
        """The next message; waits for it, so poll :meth:`fileno` first. Raises EOFError or OSError at the end."""
        message: list[Any] = msgpack.unpackb(self._line.recv_bytes())
        return message

    def fileno(self) -> int:
        """The descriptor that poll(2) finds readable when there is a message, or when the process has ended."""
        return self._line.fileno()

    def watch_connections(self) -> None:
        """Remember the connections to the peers, which are there now."""
        self._sockets = self._open_sockets()

    def has_lost_connection(self) -> bool:
        """Whether Gloo has closed a connection, because the peer did. Gloo's own thread does so during operations.

        An operation that waits for another peer does not end by that.
        """
        return not self._sockets <= self._open_sockets()

    def kill(self) -> None:
        """End the process, and with it the connections to the peers, who notice."""
        with self._lock:
            if not self._is_closed:
                self._process.kill()

    def close(self) -> None:
        """Kill the process and release everything. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            _alive.discard(self)
            self._process.kill()
            self._process.wait()  # the kernel ends a killed process, which has nothing to write
            self._release()

    def disown(self) -> None:
        """In a forked child: close its copies of the descriptors, which would hide the end of this rank."""
        if not self._is_closed:
            self._is_closed = True
            self._release()

    def _open_sockets(self) -> frozenset[str]:
        """The sockets of the process; those that are known where the list cannot be read, for want of descriptors."""
        folder = f"/proc/{self._process.pid}/fd"
        try:
            targets = [_target(f"{folder}/{name}") for name in os.listdir(folder)]
        except OSError:
            return self._sockets
        return frozenset(target for target in targets if target.startswith("socket:"))

    def _release(self) -> None:
        self._line.close()
        os.close(self._lifeline)
        self._shared.close()


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # it was closed meanwhile
        return ""


def _disown_all() -> None:
    for helper in list(_alive):
        helper.disown()


os.register_at_fork(after_in_child=_disown_all)
