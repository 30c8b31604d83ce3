"""The TCP connections of a Gloo group: how to find them, and how to end the operations that use them.

Observations on Gloo in torch 2.13:

* ``abort()`` of the process group does nothing to a running operation, and ``wait(timeout)`` ends the wait, not the
  operation. Shutting down its connections ends the operation at once, here and at the peers.
* Shutting down the *listening* socket terminates the process: an exception on Gloo's own thread.
* Dropping the group while an operation runs blocks the dropping thread (which holds no GIL) until the operation ends,
  at worst for the timeout. With the connections shut down it takes 20 ms and leaves no thread and no descriptor.
* A failed operation closes the connection to the dead peer only; members further along the ring would wait for the
  timeout. So a member that sees a failure shuts down all its connections, and every member notices.
* An operation that starts just when a connection breaks may miss it and wait for the timeout, about once in 50 times.
  The closed connection can be detected, though.

Gloo keeps its descriptors to itself, but a connection is known by its two addresses: each member listens on a port of
its own, so each connection of the group has such a port at one end.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from collectives.net import descriptors

ADDRESS_BYTES = 28
"""Size of a sockaddr_in6; an IPv4 address is padded with zeros."""

NOWHERE = bytes(ADDRESS_BYTES)

Ends = tuple[bytes, bytes]
"""The local and the remote address of a connection."""

# Not Python's socket: creating one from a descriptor changes its flags for all its holders if a default timeout is set.
_libc = ctypes.CDLL(None)


class Connections:
    """The connections of the group in which this member listens on ``address``. NOWHERE matches nothing."""

    def __init__(self, address: bytes) -> None:
        self._address = address
        self._peers: frozenset[bytes] = frozenset()
        self._found: frozenset[Ends] = frozenset()

    def find(self, peers: frozenset[bytes]) -> None:
        """Call this once when the group is connected: ``peers`` are the addresses that the members listen on."""
        self._peers = peers
        self._found = self._ends()

    def broken(self) -> bool:
        """Whether Gloo has closed any of them."""
        return not self._found <= self._ends()

    def shut_down(self) -> None:
        """End every operation that uses them."""
        for connection in self._open():
            _libc.shutdown(connection, socket.SHUT_RDWR)

    def _ends(self) -> frozenset[Ends]:
        """Other threads may hold duplicates of a connection for a moment; they have the same two addresses."""
        return frozenset((_local(connection), _remote(connection)) for connection in self._open())

    def _open(self) -> Iterator[int]:
        """A duplicate of each, because a descriptor number may be reused for another socket at any time.

        The descriptor itself where none is left for a duplicate: a lack of descriptors is no lost connection.
        """
        for descriptor in open_sockets():
            with suppress(OSError), _duplicate(descriptor) as connection:
                remote = _remote(connection)
                if remote != NOWHERE and (_local(connection) == self._address or remote in self._peers):
                    yield connection


def open_sockets() -> Iterator[int]:
    """The descriptors of this process that are sockets."""
    for descriptor in _numbers():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                yield descriptor


def _numbers() -> Iterable[int]:
    """Numbers that include all open descriptors; listing those needs a free descriptor, counting up does not."""
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError as error:
        if not descriptors.are_exhausted(error):
            return ()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(limit)


def unconnected_addresses(sockets: set[int]) -> set[bytes]:
    """The addresses of the ``sockets`` that have an address but no peer."""
    return {_local(descriptor) for descriptor in sockets if _remote(descriptor) == NOWHERE} - {NOWHERE}


@contextmanager
def _duplicate(descriptor: int) -> Iterator[int]:
    try:
        duplicate = os.dup(descriptor)
    except OSError as error:
        if not descriptors.are_exhausted(error):
            raise
        yield descriptor
        return
    try:
        yield duplicate
    finally:
        os.close(duplicate)


def _local(descriptor: int) -> bytes:
    return _address(_libc.getsockname, descriptor)


def _remote(descriptor: int) -> bytes:
    return _address(_libc.getpeername, descriptor)


def _address(question: Callable[..., Any], descriptor: int) -> bytes:
    """A sockaddr of an internet address as the kernel wrote it, NOWHERE if there is none."""
    memory, length = ctypes.create_string_buffer(ADDRESS_BYTES), ctypes.c_uint32(ADDRESS_BYTES)
    if question(descriptor, memory, ctypes.byref(length)):
        return NOWHERE
    family = int.from_bytes(memory.raw[:2], sys.byteorder)
    return memory.raw if family in (socket.AF_INET, socket.AF_INET6) else NOWHERE
