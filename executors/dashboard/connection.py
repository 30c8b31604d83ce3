"""The connections to the live page: each one must send its request in time, and their number is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

__all__ = ["PageConnection"]

MOST_CONNECTIONS = 128
"""The driver has its descriptors for the job."""
REQUEST_SECONDS = 8.0
"""Less than the time that any connection of a stranger has: this end tells the reason."""
LONGEST_HEAD = 1 << 14
END_OF_HEAD = b"\r\n\r\n"
CROWDED = "the page of this job has too many connections; try again in a moment\n"
LATE = "no whole request came in time\n"
LONG = f"a request to this page has {LONGEST_HEAD >> 10} KiB at most\n"


class PageConnection(asyncio.Protocol):
    """One connection. The head of its request must come in REQUEST_SECONDS.

    ``server`` makes the protocol that answers the request. ``connections`` are those that are open. On the thread of
    their loop.
    """

    def __init__(self, server: Callable[[], asyncio.Protocol], connections: set[PageConnection]) -> None:
        self._server = server
        self._connections = connections
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._inside: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._connections) >= MOST_CONNECTIONS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, CROWDED)
            return
        self._connections.add(self)
        # Owned by the connection. Bound: REQUEST_SECONDS. Abort: _open() and connection_lost() cancel it.
        self._timer = asyncio.get_running_loop().call_later(
            REQUEST_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT, LATE
        )

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._inside is not None:
            self._inside.data_received(data)
            return
        self._head = (self._head + data).lstrip(b"\r\n")  # aiohttp skips empty lines, too, and waits for a request
        if END_OF_HEAD in self._head[:LONGEST_HEAD]:
            self._open()
        elif len(self._head) >= LONGEST_HEAD:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, LONG)

    def _open(self) -> None:
        self._stop_timer()
        head, self._head = self._head, b""
        if self._transport is not None and not self._transport.is_closing():
            self._inside = self._server()
            self._inside.connection_made(self._transport)
            self._inside.data_received(head)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._stop_timer()
        if self._transport is not None and not self._transport.is_closing():
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            self._transport.write(f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode())
            self._transport.close()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool | None:
        """See :class:`asyncio.Protocol`."""
        return None if self._inside is None else self._inside.eof_received()

    def pause_writing(self) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        if self._inside is not None:
            self._inside.pause_writing()

    def resume_writing(self) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        if self._inside is not None:
            self._inside.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        self._stop_timer()
        self._connections.discard(self)
        if self._inside is not None:
            self._inside.connection_lost(exc)
