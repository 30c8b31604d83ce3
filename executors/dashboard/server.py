"""Serves the live page: the page itself, its news as server-sent events, and the request to record."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from collectives import Acceptor, interfaces, override
from executors.dashboard.picture import Address
from executors.job.server import ServerThread, Started

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler


MOST_CONNECTIONS = 128
"""The driver has its descriptors for the job."""
REQUEST_SECONDS = 8.0
"""Less than the time that any connection of a stranger has: this end tells the reason."""
LONGEST_HEAD = 1 << 14
END_OF_HEAD = b"\r\n\r\n"
CONNECTIONS_CROWDED = "the page of this job has too many connections; try again in a moment\n"
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

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._connections) >= MOST_CONNECTIONS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, CONNECTIONS_CROWDED)
            return
        self._connections.add(self)
        # Owned by the connection. Bound: REQUEST_SECONDS. Abort: _open() and connection_lost() cancel it.
        self._timer = asyncio.get_running_loop().call_later(
            REQUEST_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT, LATE
        )

    @override
    def data_received(self, data: bytes) -> None:
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

    @override
    def eof_received(self) -> bool | None:
        return None if self._inside is None else self._inside.eof_received()

    @override
    def pause_writing(self) -> None:
        if self._inside is not None:
            self._inside.pause_writing()

    @override
    def resume_writing(self) -> None:
        if self._inside is not None:
            self._inside.resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._connections.discard(self)
        if self._inside is not None:
            self._inside.connection_lost(exc)


TICK_SECONDS = 1.0


class Pictures:
    """``draw`` returns the picture of now: it is called, and encoded, once a tick. For one thread."""

    def __init__(self, draw: Callable[[], Mapping[str, Any]]) -> None:
        self._draw = draw
        self._drawn = b""
        self.due = 0.0
        """When the next one can be had, in monotonic seconds."""

    def now(self) -> bytes:
        """The last picture, as JSON: no older than a tick."""
        return self._drawn if time.monotonic() < self.due else self.new()

    def new(self) -> bytes:
        """A picture of this moment, as JSON."""
        self._drawn = json.dumps(self._draw()).encode()
        self.due = time.monotonic() + TICK_SECONDS
        return self._drawn


STOP_SECONDS = 5.0
CLEANUP_SECONDS = 1.0
READER_SECONDS = 30.0
"""The server ends a connection whose reader lags behind by a picture for so many seconds."""
MOST_STREAMS = 32
"""More pages at once are refused, so that links in many hands cost the driver no more."""
MOST_STRANGERS = 64
"""Fewer than the connections that the page may have: those of strangers must not keep a reader out."""
BODY_LIMIT = 1 << 10
REFUSED = "this link has no token, or that of another job; use the link that the launcher has printed\n"
CROWDED = f"{MOST_STREAMS} pages of this job are open already; close one\n"


class DashboardServer:
    """Serves what ``picture`` returns at ``address``, from :meth:`start` to :meth:`stop`, to those with the link.

    ``record`` is called when somebody presses the button; it returns a sentence. Both are called on the thread of the
    server. Owns the daemon thread "hvd-dashboard".
    """

    def __init__(self, address: Address, picture: Callable[[], Mapping[str, Any]], record: Callable[[], str]) -> None:
        self._address = address
        self._pictures = Pictures(picture)
        self._record = record
        self._token = secrets.token_urlsafe(24)
        self._port = 0
        self._is_serving = False
        self._streams = 0
        self._last: bytes | None = None
        self._end: asyncio.Event | None = None
        # Stopped by stop(), which waits for STOP_SECONDS at most.
        self._thread = ServerThread("hvd-dashboard", self._serve)

    @property
    def link(self) -> str:
        """The address of the page, with the token; for a wildcard with the name of this host."""
        is_any = self._address.host in ("0.0.0.0", "::")
        shown = Address(socket.gethostname() if is_any else self._address.host, self._port)
        return f"http://{shown}/?token={self._token}"

    def start(self) -> None:
        """Serve from now on. Raises OSError where the address cannot be had, and ExecutorError."""
        listener = interfaces.listen(self._address.host, self._address.port)
        self._port = listener.getsockname()[1]
        self._thread.start(listener)
        self._is_serving = True

    def stop(self) -> None:
        """End all streams with a last picture, and release the port; for a few seconds at most. May be called twice."""
        if self._is_serving:
            self._is_serving = False
            self._thread.stop(STOP_SECONDS)

    # On its thread.

    async def _serve(self, listener: socket.socket, started: Started) -> None:
        from aiohttp import web

        loop = asyncio.get_running_loop()
        self._end = asyncio.Event()

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_refused = self._is_refused(request)
            if not is_refused:
                acceptor.authenticated(request.transport)
            try:
                answer = await (_refuse if is_refused else handler)(request)
            except web.HTTPException as error:
                error.force_close()
                raise
            answer.force_close()  # the next request has the same bounds
            return answer

        app = web.Application(middlewares=[guard], client_max_size=BODY_LIMIT)
        app.add_routes([web.get("/", self._page), web.get("/picture", self._once), web.get("/events", self._stream)])
        app.add_routes([web.post("/record", self._press)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLEANUP_SECONDS)
        await runner.setup()
        connections: set[PageConnection] = set()
        inside = cast("web.Server", runner.server)
        acceptor = Acceptor(listener, lambda: PageConnection(inside, connections), "the live page", MOST_STRANGERS)
        async with acceptor:
            started.set_result(partial(loop.call_soon_threadsafe, self._end.set))
            await self._end.wait()
        await runner.cleanup()
        for connection in list(connections):
            connection.close()

    def _is_refused(self, request: web.Request) -> bool:
        """Whether ``request`` lacks the token; it takes as long for any wrong one."""
        given = request.query.get("token", "")
        return not hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    async def _page(self, request: web.Request) -> web.Response:
        from aiohttp import web

        nonce = secrets.token_urlsafe(12)
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
        # In a script, only a < could end it.
        picture = self._pictures.now().decode().replace("<", "\\u003c")
        text = _template().replace("NONCE", nonce).replace("PICTURE", picture)
        headers = {**HEADERS, "Content-Security-Policy": policy}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _once(self, request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(body=self._pictures.now(), content_type="application/json", headers=HEADERS)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        if self._streams >= MOST_STREAMS:
            return web.Response(status=503, text=CROWDED, headers=HEADERS)
        self._streams += 1
        try:
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            await self._send_all(response)
        except ConnectionResetError:
            pass  # the reader has closed the page
        except asyncio.TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return response

    async def _send_all(self, response: web.StreamResponse) -> None:
        end = self._end or asyncio.Event()
        while True:
            is_last = end.is_set()
            picture = self._final() if is_last else self._pictures.now()
            await _write(response, b"data: " + picture + b"\n\n")
            if is_last:
                await _write(response, b"event: end\ndata: 0\n\n")
                return
            with suppress(asyncio.TimeoutError):  # on Python 3.10 this is not the builtin TimeoutError
                await asyncio.wait_for(end.wait(), max(0.0, self._pictures.due - time.monotonic()))

    def _final(self) -> bytes:
        """The picture of the end, once for all."""
        if self._last is None:
            self._last = self._pictures.new()
        return self._last

    async def _press(self, request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text=self._record(), headers=HEADERS)


async def _refuse(request: web.Request) -> web.StreamResponse:
    from aiohttp import web

    return web.Response(status=403, text=REFUSED, headers=HEADERS)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Raises asyncio.TimeoutError if the reader lags behind by a picture for READER_SECONDS, and
    ConnectionResetError.
    """
    await asyncio.wait_for(response.write(data), READER_SECONDS)


HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _template() -> str:
    return files("executors.dashboard").joinpath("page.html").read_text("utf-8")
