"""The TCP connections of a Gloo group: how to find them and how to end what runs on them.

What was found out about Gloo in torch 2.13, and is relied upon:

* ``abort()`` of the process group does nothing to a running operation, and ``wait(timeout)`` gives up waiting, not the
  operation. Shutting down the TCP connections under it ends the operation at once, here and at the peers.
* Shutting down the *listening* socket terminates the process (an exception on Gloo's own thread).
* Dropping the group while an operation runs blocks the dropping thread (without the GIL) until the operation ends, at
  worst for the timeout. With the connections shut down it takes 10 ms, and leaves no thread and no descriptor.
* A failed operation closes the connection to the dead peer only: members further along the ring would wait for their
  timeout. So a member that sees a failure shuts all its connections down, and everybody learns of it.
* With one worker thread instead of two, a small operation takes milliseconds on a busy machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["Connections", "listeners"]


class Connections:
    """The TCP connections of one group, found by the addresses its members listen on.

    Gloo has no call that ends a running operation, and keeps its descriptors to itself; Linux shows them in /proc.
    An address is one in the notation of /proc/net/tcp, "" where it is not known.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.peers: frozenset[str] = frozenset()

    def shut_down(self) -> None:
        """End every operation that runs on these connections."""
        for descriptor, inode, (local, remote, listening) in _tcp_sockets():
            if not listening and (local == self.address or remote in self.peers):
                _shut_down(descriptor, inode)


def _tcp_sockets() -> Iterator[tuple[int, str, tuple[str, str, bool]]]:
    """Descriptor, inode and (local address, remote address, listening) of each TCP socket of this process."""
    table = _tcp_table()
    for descriptor, inode in _open_sockets():
        if inode in table:
            yield descriptor, inode, table[inode]


def _tcp_table() -> dict[str, tuple[str, str, bool]]:
    table = {}
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError), open(path) as lines:
            next(lines)
            for fields in map(str.split, lines):
                table[fields[9]] = (fields[1], fields[2], fields[3] == "0A")
    return table


def _open_sockets() -> Iterator[tuple[int, str]]:
    with suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            inode = _socket_inode(descriptor)
            if inode:
                yield descriptor, inode


def _socket_inode(descriptor: int) -> str:
    with suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if target.startswith("socket:["):
            return target[len("socket:[") : -1]
    return ""


def _shut_down(descriptor: int, inode: str) -> None:
    """Shut down the connection ``inode``. The number may be another file by now, so look again at a duplicate."""
    with suppress(OSError):
        duplicate = os.dup(descriptor)
        if _socket_inode(duplicate) != inode:
            os.close(duplicate)
            return
        with socket.socket(fileno=duplicate) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def listeners() -> set[str]:
    """The addresses this process listens on."""
    return {local for _, _, (local, _, listening) in _tcp_sockets() if listening}
