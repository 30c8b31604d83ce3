"""A piece of memory shared by the ranks of a host: a memfd, handed over a Unix socket; nothing outlives the ranks."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from collectives.api import CollectiveTimeoutError, PeerLostError, Store

__all__ = ["Segment"]

CREDENTIALS = struct.Struct("3i")


class Segment:
    """``nbytes`` of zeroed shared memory. ``array`` views it; let go of all views before :meth:`close`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @classmethod
    def share(cls, store: Store, rank: int, size: int, nbytes: int, timeout: float) -> Segment:
        """The segment of a group whose ranks all call this with one store; raises what connecting raises."""
        descriptor = _create(store, size, nbytes, timeout) if rank == 0 else _receive(store, timeout)
        try:
            return cls(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmap the memory, or leave it to the last view that is still held."""
        del self.array
        with suppress(BufferError):  # a view in a traceback keeps it alive; it goes with the view
            self._map.close()


def _create(store: Store, size: int, nbytes: int, timeout: float) -> int:
    descriptor = os.memfd_create("hvd-cluster", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        _hand_out(store, descriptor, size - 1, timeout)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _hand_out(store: Store, descriptor: int, count: int, timeout: float) -> None:
    name = f"\0hvd-cluster-{secrets.token_hex(16)}"
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(count)
        store.set("address", name.encode())
        while count:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise CollectiveTimeoutError(
                    f"{count} ranks of this host did not fetch the shared memory within {timeout:g} s"
                ) from None
            with connection, suppress(OSError):  # whoever leaves now is missed elsewhere
                if _same_user(connection):
                    socket.send_fds(connection, [b"m"], [descriptor])
                    count -= 1


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def _receive(store: Store, timeout: float) -> int:
    name = store.get("address", timeout).decode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(name)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise PeerLostError(
                f"the shared memory of this host cannot be fetched from its first rank: {error}"
            ) from error
    if not descriptors:
        raise PeerLostError("the first rank of this host ended before it handed out the shared memory")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]
