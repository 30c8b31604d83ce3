"""The connections of the rendezvous server, and the limits of the unauthenticated ones.

Any host on the network can connect. Therefore only some of the descriptors of this process go to unauthenticated
connections, each of them must send a signed request before a deadline, and the oldest is closed where others wait.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from collectives import descriptors
from collectives.rendezvous.service import Service

__all__ = ["HttpServer"]

_log = logging.getLogger(__name__)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Bytes that are not HTTP cost a line in the log, not a traceback: a port scanner must not fill the log."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
    return True


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_without_traceback)

DEADLINE = 10.0
"""Seconds in which a connection has to send a signed request."""
SILENCE = 0.5
"""Seconds after which an unauthenticated connection is closed if others wait."""
PAUSE = 0.1
"""Seconds without accepting, after the process ran out of descriptors."""
LEAST_UNAUTHENTICATED = 16
MOST_UNAUTHENTICATED = 1024
_IDLE_TIMEOUT = 75.0
# The server reads from a refused sender for this long, and drops the data: closing at once would reset the
# connection, and the sender would lose the refusal.
_LINGER = 2.0


@dataclass(frozen=True, slots=True)
class _Unauthenticated:
    since: float
    timer: asyncio.TimerHandle


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
            logger=_http_log,
        )
        self._service = service
        self._listener = listener
        self._transports: dict[web.RequestHandler, asyncio.Transport] = {}
        self._unauthenticated: dict[web.RequestHandler, _Unauthenticated] = {}
        self._connecting: set[asyncio.Task[object]] = set()
        self._capacity = descriptors.share_of_strangers(0, LEAST_UNAUTHENTICATED, MOST_UNAUTHENTICATED)
        self._paused_until = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._is_accepting = False
        self._is_closed = False
        self._warned: set[str] = set()

    def start(self) -> None:
        """Begin to accept connections."""
        self._listener.setblocking(False)
        self._update()

    async def close(self, timeout: float) -> None:
        """Stop accepting, give an answer under way ``timeout`` seconds, and close all connections."""
        self._is_closed = True
        self._update()
        self._listener.close()
        await asyncio.gather(*self._connecting, return_exceptions=True)
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
        return await self._service.handle(request, functools.partial(self._discharge, request.protocol))

    # Accepting.

    def _update(self) -> None:
        """Accept connections while there is room; else make room soon."""
        now = self._loop.time()
        is_full = len(self._unauthenticated) >= self._capacity
        if is_full and now >= self._oldest().since + SILENCE:
            self._drop_silent(now)
            is_full = False
        may_accept = not (self._is_closed or is_full) and now >= self._paused_until
        self._accept_if(may_accept)
        if self._retry is not None:
            self._retry.cancel()
        when = self._oldest().since + SILENCE if is_full else self._paused_until
        self._retry = None if may_accept or self._is_closed else self._loop.call_at(when, self._update)

    def _accept_if(self, may_accept: bool) -> None:
        if may_accept and not self._is_accepting:
            self._loop.add_reader(self._listener, self._accept)
        elif self._is_accepting and not may_accept:
            self._loop.remove_reader(self._listener)
        self._is_accepting = may_accept

    def _accept(self) -> None:
        """Accept one connection: in a burst, those accepted before authenticate in the meantime."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        sock.setblocking(False)
        handler = self()
        timer = self._loop.call_later(DEADLINE, self._expire, handler)
        self._unauthenticated[handler] = _Unauthenticated(self._loop.time(), timer)
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: handler, sock))
        self._connecting.add(task)
        task.add_done_callback(functools.partial(self._connected, handler))
        if len(self._unauthenticated) >= self._capacity:
            text = f"{self._capacity} connections have not sent a signed request, and no more are accepted at once"
            self._warn("full", f"{text}; if workers are among them, raise the limit of ulimit -n")
            self._update()

    def _connected(self, handler: web.RequestHandler, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._discharge(handler)

    def _pause(self, error: OSError) -> None:
        reason = descriptors.EXHAUSTED if descriptors.are_exhausted(error) else "the listening socket refuses"
        self._warn("pause", f"a connection cannot be accepted: {reason} ({error})")
        now = self._loop.time()
        if self._unauthenticated:
            self._drop_silent(now)
        self._paused_until = now + PAUSE
        self._update()

    def _warn(self, kind: str, text: str) -> None:
        """Log each kind of problem once: strangers must not fill the log."""
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, "rendezvous server: %s", text)

    # Connections.

    def _oldest(self) -> _Unauthenticated:
        return next(iter(self._unauthenticated.values()))

    def _drop_silent(self, now: float) -> None:
        """Drop the oldest connection, and all others that have been silent for long enough."""
        first, *others = self._unauthenticated
        self._drop(first)
        for handler in others:
            if now >= self._unauthenticated[handler].since + SILENCE:
                self._drop(handler)

    def _drop(self, handler: web.RequestHandler) -> None:
        self._unauthenticated.pop(handler).timer.cancel()
        if handler in self._transports:
            self._transports[handler].abort()

    def _expire(self, handler: web.RequestHandler) -> None:
        _log.debug("rendezvous server: a connection sent no signed request within %g s", DEADLINE)
        self._drop(handler)
        self._update()

    def _discharge(self, handler: web.RequestHandler) -> None:
        """The connection of ``handler`` is authenticated, or has ended."""
        unauthenticated = self._unauthenticated.pop(handler, None)
        if unauthenticated is not None:
            unauthenticated.timer.cancel()
            if not self._is_accepting:
                self._update()

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._transports[handler] = transport

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._transports.pop(handler, None)
        self._discharge(handler)
