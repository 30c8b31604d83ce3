"""A piece of memory shared by the ranks of a host: a memfd, handed over a Unix socket; nothing outlives the ranks."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import select
import socket
import struct
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError
from collectives.backends.base import Group
from collectives.net.attempts import ConnectAttempt

CREDENTIALS = struct.Struct("3i")


class Segment:
    """``nbytes`` of zeroed shared memory. ``array`` views it; let go of all views before :meth:`close`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Unmap the memory; while views are held, the last one to be freed does so."""
        del self.array
        with suppress(BufferError):  # a view in a traceback keeps it mapped until the view is freed
            self._map.close()


class SegmentSource:
    """The first member's side: new memory of ``nbytes``, which the other members fetch at ``address``."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.address = f"\0hvd-cluster-{secrets.token_hex(16)}".encode()
        self._nbytes = nbytes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(self.address)
            self._listener.listen(count)
            self._descriptor = os.memfd_create("hvd-cluster", os.MFD_CLOEXEC)
        except OSError as error:
            self._listener.close()
            raise _explained(error, "the shared memory of this host cannot be created") from error

    def hand_out(self, group: Group, attempt: ConnectAttempt) -> Segment:
        """The memory, once every other member of ``group`` has fetched it."""
        os.ftruncate(self._descriptor, self._nbytes)
        absent = set(group.others)
        while absent:
            if not attempt.wait({self._listener.fileno(): select.POLLIN}):
                raise CollectiveTimeoutError(
                    f"{group.describe(sorted(absent))} did not fetch the shared memory in time; look at their output, "
                    "or raise HOROVOD_GLOO_TIMEOUT_SECONDS",
                    group.ranks_at(sorted(absent)),
                )
            absent.discard(self._serve(attempt))
        return Segment(self._descriptor, self._nbytes)

    def _serve(self, attempt: ConnectAttempt) -> int | None:
        """Hand the memory to one member; returns its position, None for a process that is no member."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            raise _explained(error, "the shared memory cannot be handed to the other ranks of this host") from error
        with connection, suppress(ConnectionError, BlockingIOError):  # a member that leaves now is reported elsewhere
            if _same_user(connection) and attempt.wait({connection.fileno(): select.POLLIN}):
                position = int.from_bytes(connection.recv(4), "big")
                socket.send_fds(connection, [b"m"], [self._descriptor])
                return position
        return None

    def close(self) -> None:
        """Stop listening; the memory stays with its segments. Idempotent."""
        self._listener.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def receive_segment(address: bytes, nbytes: int, group: Group, attempt: ConnectAttempt) -> Segment:
    """The memory of ``nbytes`` that the first member of ``group`` hands out at ``address``."""
    first = group.describe([0])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            _connect(connection, address, attempt)
            connection.send(group.position.to_bytes(4, "big"))
            if not attempt.wait({connection.fileno(): select.POLLIN}):
                raise CollectiveTimeoutError(f"{first} did not hand out the shared memory in time", [group.ranks[0]])
            _, descriptors, flags, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        raise _explained(error, f"the shared memory cannot be fetched from {first}", group) from error
    if flags & socket.MSG_CTRUNC:
        raise _explained(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "the shared memory cannot be fetched")
    if not descriptors:
        text = f"{first} ended before it handed out the shared memory; look at its output"
        raise PeerLostError(text, [group.ranks[0]], [group.hosts[0]])
    try:
        os.set_inheritable(descriptors[0], False)
        return Segment(descriptors[0], nbytes)
    finally:
        os.close(descriptors[0])


def _connect(connection: socket.socket, address: bytes, attempt: ConnectAttempt) -> None:
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:  # the backlog is full
            if attempt.is_over:
                raise
            attempt.wait({}, 0.01)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def _explained(error: OSError, problem: str, group: Group | None = None) -> HorovodInternalError:
    """The engine's error for ``error``: a lack of descriptors is no loss of a rank."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return HorovodInternalError(f"{problem}: no file descriptor is left; raise the limit of ulimit -n ({error})")
    ranks, hosts = (group.ranks[:1], group.hosts[:1]) if group else ((), ())
    return PeerLostError(f"{problem}: {error}", ranks, hosts)
