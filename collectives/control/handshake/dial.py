"""A call to the listener of another rank."""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections.abc import Mapping
from typing import Any

from collectives import descriptors
from collectives.api import PeerLostError
from collectives.attempt import ConnectAttempt
from collectives.control.handshake.frames import Wire
from collectives.control.handshake.hello import LocalEnd
from collectives.control.sockets import end_in_silence

__all__ = ["dial", "family_of"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.02


def dial(end: LocalEnd, entry: Mapping[str, Any], host: int) -> Wire:
    """A connection to the listener of rank ``host``; ConnectionRefusedError where it no longer listens."""
    if entry["host"] == end.hello.host:
        try:
            return _open(end, socket.AF_UNIX, entry["unix"])
        except OSError as error:
            _check_descriptors(error, end.hello.rank)
            logger.debug("rank %d is on this host, but in another network namespace or gone; using TCP", host)
    while True:
        try:
            return _open(end, family_of(entry["tcp"][0]), tuple(entry["tcp"]))
        except ConnectionRefusedError:
            raise
        except OSError as error:
            _check_descriptors(error, end.hello.rank)
            if not end.attempt.remaining:
                raise PeerLostError(f"rank {host} does not answer at {entry['tcp']}: {error}", [host]) from error
            end.attempt.wait({}, RETRY_SECONDS)


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address of a network."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _check_descriptors(error: OSError, rank: int) -> None:
    """Raise HorovodInternalError where ``error`` is no fault of the other rank: ``rank`` has no descriptor left."""
    if descriptors.are_exhausted(error):
        raise descriptors.explained(error, rank) from error


def _open(end: LocalEnd, family: int, address: Any) -> Wire:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _finish(sock, sock.connect_ex(address), end.attempt)
        end_in_silence(sock, end.heartbeat)
    except BaseException:
        sock.close()
        raise
    return Wire(sock, end.attempt)


def _finish(sock: socket.socket, problem: int, attempt: ConnectAttempt) -> None:
    """Wait for a connection that is under way; OSError where it fails."""
    if problem == errno.EINPROGRESS:
        if not attempt.wait({sock.fileno(): select.POLLOUT}):
            raise TimeoutError("no answer in time")
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, errno.errorcode.get(problem, "unknown error"))
