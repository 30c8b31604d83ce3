"""The program of a helper process: it owns a context of Gloo and runs the commands of its rank, one at a time.

The rank starts it with :data:`PROGRAM` and talks to it in msgpack. The first command is ``open``. Then the helper sends
``["entry", bytes]``, gets ``["entries", [bytes, ...]]`` and sends ``["done"]``. To every later command it answers
``["done"]``, or ``["failed", text]`` and ends; ``["not imported", text]`` where the import of pygloo fails.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgpack


class SharedMemory:
    """A file in memory, which each side maps again after it has grown. ``descriptor`` is owned by this object."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedMemory:
        """New memory, without a name: nothing is left when both sides have ended."""
        return cls(os.memfd_create("hvd-pygloo", os.MFD_CLOEXEC))

    def grow(self, nbytes: int) -> mmap.mmap:
        """The memory, with at least ``nbytes``; more than before on request of the rank only."""
        if nbytes > self._size():
            os.ftruncate(self.descriptor, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if self._map is None or len(self._map) < nbytes:
            self._map = mmap.mmap(self.descriptor, self._size())
        return self._map

    def address(self, offset: int, nbytes: int) -> int:
        """The address of the byte at ``offset``, in the process of the caller; ``nbytes`` follow."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.grow(offset + nbytes), offset))

    def close(self) -> None:
        """Give back the descriptor; the memory goes with its last view."""
        os.close(self.descriptor)
        self._map = None

    def _size(self) -> int:
        return os.fstat(self.descriptor).st_size


PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from collectives.backends.pygloo.helper import main; main(*map(int, sys.argv[1:4]))"
)
"""Its arguments are the descriptors of the connection, the memory and the lifeline, then the search path."""

_DTYPES = {
    "uint8": "glooUint8",
    "int8": "glooInt8",
    "int32": "glooInt32",
    "int64": "glooInt64",
    "float32": "glooFloat32",
    "float64": "glooFloat64",
}


def main(line: int, memory: int, lifeline: int) -> None:
    """Serve the rank at the other end of ``line`` until it or its rank ends."""
    # A signal to the whole job is for the ranks; this process ends with its own.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with(lifeline)
    connection = Connection(line)
    with suppress(EOFError, OSError):  # the rank needs this process no more
        _serve(connection, SharedMemory(memory))
    os._exit(0)  # Gloo may wait for peers while it is dropped


def _end_with(lifeline: int) -> None:
    """Let the kernel end this process when the other end of the pipe ``lifeline`` closes, also inside Gloo.

    SIGIO ends a process that does not handle it. Nothing is ever written to the pipe.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    if poller.poll(0):  # it was closed before
        os._exit(0)


def _serve(connection: Connection, memory: SharedMemory) -> None:
    """Bound and abort of the waits: the rank, whose end closes ``connection``."""
    context: _Context | None = None
    while True:
        name, *arguments = msgpack.unpackb(connection.recv_bytes())
        try:
            if context is None:
                context = _Context(connection, memory, *arguments)
            else:
                context.run(name, *arguments)
        except (EOFError, OSError):
            raise
        except ImportError as error:
            connection.send_bytes(msgpack.packb(["not imported", str(error)]))
            return
        except Exception as error:  # noqa: BLE001 - for the rank
            connection.send_bytes(msgpack.packb(["failed", str(error)]))
            return
        connection.send_bytes(msgpack.packb(["done"]))


class _Directory:
    """The store that Gloo uses: the entry of this member goes to the rank, and those of all come from there.

    The entry of a member has its position as its key. Gloo also exchanges host names, for its messages; all are empty
    here.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._entries: Sequence[bytes] = ()

    def set(self, key: str, value: Any) -> None:
        if key.isdigit():
            self._connection.send_bytes(msgpack.packb(["entry", bytes(value)]))

    def get(self, key: str) -> bytes:
        if not key.isdigit():
            return b""
        self.receive()
        return self._entries[int(key)]

    def wait(self, keys: Sequence[str], *timeout: object) -> None:
        """Nothing to do: :meth:`get` waits."""

    def receive(self) -> None:
        """Wait for the entries of all members, unless they are here."""
        if not self._entries:
            _, self._entries = msgpack.unpackb(self._connection.recv_bytes())


class _Context:
    """A member of a group of Gloo, connected to the others.

    Gloo gives up after 30 s of silence. pygloo cannot change that: its ``setTimeout`` accepts no argument.
    """

    def __init__(
        self,
        connection: Connection,
        memory: SharedMemory,
        position: int,
        size: int,
        address: str,
    ) -> None:
        import pygloo

        self._library, self._memory = pygloo, memory
        # pygloo keeps no reference to them.
        self._directory = _Directory(connection)
        self._store = pygloo.rendezvous.CustomStore(self._directory)
        self._device = pygloo.transport.tcp.CreateDevice(pygloo.transport.tcp.attr(address))
        self._context = pygloo.rendezvous.Context(position, size)
        self._context.connectFullMesh(self._store, self._device)
        self._directory.receive()  # a single member has asked for none
        self._commands: dict[str, Callable[..., None]] = {
            "exchange": self._exchange,
            "allgather": self._allgather,
            "broadcast": self._broadcast,
            "allreduce": self._allreduce,
            "barrier": self._barrier,
        }

    def run(self, name: str, *arguments: Any) -> None:
        """Do the command ``name``."""
        self._commands[name](*arguments)

    def _exchange(self, transfers: Sequence[tuple[int, bool, int, int]]) -> None:
        for peer, is_send, offset, length in transfers:
            call = self._library.send if is_send else self._library.recv
            call(self._context, self._memory.address(offset, length), length, self._dtype("uint8"), peer)

    def _allgather(self, source: int, destination: int, length: int, size: int) -> None:
        result = self._memory.address(destination, length * size)
        self._library.allgather(
            self._context, self._memory.address(source, length), result, length, self._dtype("uint8")
        )

    def _broadcast(self, offset: int, length: int, root: int) -> None:
        data = self._memory.address(offset, length)
        self._library.broadcast(self._context, data, data, length, self._dtype("uint8"), root)

    def _allreduce(self, nbytes: int, count: int, dtype: str, op: str) -> None:
        data = self._memory.address(0, nbytes)
        op = getattr(self._library.ReduceOp, op)
        ring = self._library.allreduceAlgorithm.RING
        self._library.allreduce(self._context, data, data, count, self._dtype(dtype), op, ring)

    def _barrier(self) -> None:
        self._library.barrier(self._context)

    def _dtype(self, label: str) -> Any:
        return getattr(self._library.glooDataType_t, _DTYPES[label])
