"""A link whose data is encrypted."""

from __future__ import annotations

import ssl
from contextlib import suppress

from collectives.backends.tcp.link import PARTING, Link

__all__ = ["SecureLink"]

WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
MOST_BYTES = 1 << 18
"""Of one call, which tells nothing before all of them have gone: a member that sends for long would look silent."""


class SecureLink(Link):
    """See :class:`Link`. The data is copied once more on each side."""

    hides_data = True

    def __init__(self, sock: ssl.SSLSocket, position: int) -> None:
        super().__init__(sock, position)
        self._secure = sock

    def part(self) -> None:
        """See :class:`Link`."""
        with suppress(OSError):
            self._secure.send(PARTING)

    def _send_some(self) -> int:
        try:
            return self._secure.send(self._unsent[0][:MOST_BYTES])  # after a wait the same bytes: TLS insists on it
        except WAITS:
            raise BlockingIOError from None

    def _receive_some(self, target: memoryview) -> int:
        try:
            return self._secure.recv_into(target)
        except WAITS:
            raise BlockingIOError from None
