"""The connections of the rendezvous server.

:mod:`collectives.reception` limits those that have not sent a signed request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from collectives.reception.acceptor import Acceptor
from collectives.rendezvous.service import Service

__all__ = ["HttpServer"]

_log = logging.getLogger(__name__)

MOST_UNAUTHENTICATED = 1024
_IDLE_TIMEOUT = 75.0
# The server reads from a refused sender for this long, and drops the data: closing at once would reset the
# connection, and the sender would lose the refusal.
_LINGER = 2.0


class HttpServer(web.Server):
    """Accepts connections of ``listener`` and lets ``service`` answer their requests. Owns ``listener``.

    Used on one event loop only. It knows every connection until it is closed; aiohttp forgets those that close slowly
    or that come during shutdown.
    """

    def __init__(self, service: Service, listener: socket.socket) -> None:
        super().__init__(
            self._handle,
            handler_cancellation=True,  # ends the long-poll of a worker that hangs up
            access_log=None,
            auto_decompress=False,  # a small body must not become a large one
            keepalive_timeout=_IDLE_TIMEOUT,
            lingering_time=_LINGER,
            logger=_http_log(self._warn),
        )
        self._service = service
        self._listener = listener
        self._transports: dict[web.RequestHandler, asyncio.Transport] = {}
        self._acceptor = Acceptor(listener, self, "the rendezvous server", MOST_UNAUTHENTICATED)

    def start(self) -> None:
        """Begin to accept connections."""
        self._acceptor.start()

    async def close(self, timeout: float) -> None:
        """Stop accepting, give an answer under way ``timeout`` seconds, and close all connections."""
        await self._acceptor.close()
        self.pre_shutdown()
        await self.shutdown(timeout)
        for transport in self._transports.values():
            transport.abort()

    def disown(self) -> None:
        """In a forked child: close this copy of the sockets, without a word to the peers."""
        connected = [transport.get_extra_info("socket").fileno() for transport in self._transports.values()]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in filter(lambda number: number >= 0, [self._listener.fileno(), *connected]):
            os.dup2(nothing, descriptor, inheritable=False)  # the objects close their numbers later
        os.close(nothing)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        on_authentic = functools.partial(self._acceptor.authenticated, request.transport)
        return await self._service.handle(request, on_authentic, self._warn)

    def _warn(self, text: str, *values: object) -> None:
        self._acceptor.warn(text, *values)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._transports[handler] = transport

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._transports.pop(handler, None)


def _http_log(warn: Callable[..., None]) -> logging.Logger:
    """A logger for aiohttp: bytes that are not HTTP cost a line with their reason, which ``warn`` may leave out."""

    def is_shown(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            warn("refused a request that is not HTTP: %.200r", str(error.message))
        return error is None or not isinstance(error, HttpProcessingError)

    log = logging.Logger(f"{__name__}.http")
    log.parent = _log
    log.addFilter(is_shown)
    return log
