"""The answers of the rendezvous server: signed requests in, signed answers out; and its connections.

::

    GET    /keys/<key>?wait=<seconds>   200 and the value, 404 when it is not there in time
    PUT    /keys/<key>                  200; the body is the value
    PUT    /keys                        200; the body is a msgpack map of keys to values, set at once
    DELETE /keys/<key>                  200, whether there was a value or not
    POST   /counters/<key>              200 and the new value; the body is the amount, both decimal
    GET    /time                        200 and the challenge and the time of this server, to sign the others with

A key is percent-encoded. A request that is refused changes nothing and gets one sentence: 400 malformed, 401 not
authentic or replayed, 404 no such path, 405 wrong method, 408 the body was late, 413 too large, 428 signed with another
challenge or time, 503 the server stops. :mod:`collectives.store.signing` describes the protection by the
signatures.

:mod:`collectives.net` limits those that have not sent a signed request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

import msgpack
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from collectives.api import InvalidRequestError
from collectives.net.acceptor import Acceptor
from collectives.store.memory import MemoryStore, check_key, parse_counter
from collectives.store.signing import (
    NO_TIME,
    NONCE,
    RefusedError,
    ReplayGuard,
    Seal,
    ServerTime,
    StaleError,
    check_body,
    sign_answer,
    verify,
)

_log = logging.getLogger(__name__)


_BODY_TIMEOUT = 30.0
# At the end of a job workers wait for keys; a worker that is lost does not finish its request; after a new start of the
# server, or a suspended host, clients sign again.
_ORDINARY = frozenset({408, 428, 503})
_TARGET = re.compile(r"/(?P<kind>keys|counters)/(?P<key>[^?]+)(\?wait=(?P<wait>[0-9]{1,9}(\.[0-9]{1,9})?))?", re.ASCII)
_SHOWN = 200
_ALL = ("PUT", "/keys")
_TIME = ("GET", "/time")

_Answer = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _Target:
    key: str
    wait: float | None


class _Refusal(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Service:
    """Answers requests from ``store``. Used on one event loop only."""

    def __init__(self, secret: bytes, store: MemoryStore, body_limit: int, wait_limit: float) -> None:
        self._secret = secret
        self._store = store
        self._body_limit = body_limit
        self._wait_limit = wait_limit
        self._challenge = secrets.token_hex(16)
        self._guard = ReplayGuard(self._challenge)
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False
        self.waiting = 0

    async def handle(
        self, request: web.BaseRequest, on_authentic: Callable[[], None], warn: Callable[..., None]
    ) -> web.Response:
        """The answer to any ``request``.

        Calls ``on_authentic`` when its head proves to be signed, and not recorded, and ``warn`` with the text of a
        warning and its values.
        """
        try:
            status, body = await self._answer(request, on_authentic)
        except _Refusal as refusal:
            status, body = refusal.status, str(refusal).encode()
            report = _log.debug if status in _ORDINARY else warn
            path = request.raw_path[:_SHOWN]
            report("refused %s %r from %s: %s", request.method, path, request.remote, refusal)
        headers = sign_answer(self._secret, status, body, request.headers.get(NONCE, ""))
        response = web.Response(status=status, body=body, headers=headers)
        if status in (401, 428):
            response.force_close()
        return response

    def wake(self, key: str) -> None:
        """Let all requests that wait for ``key`` check it again."""
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Answer all waiting requests with 503, because the server stops."""
        self._closed = True
        for key in list(self._waiters):
            self.wake(key)

    async def _answer(self, request: web.BaseRequest, on_authentic: Callable[[], None]) -> _Answer:
        if (request.content_length or 0) > self._body_limit:
            raise self._too_large()
        kind = (request.method, request.raw_path)
        try:
            seal = verify(self._secret, *kind, request.headers)
            if kind == _TIME and seal.time == NO_TIME:
                return 200, ServerTime(self._challenge, time.monotonic()).encode()
            self._guard.check(seal, time.monotonic())  # a copy of a head must not hold a connection
            on_authentic()
            return await self._obey(request, kind, seal)
        except StaleError as error:
            raise _Refusal(428, str(error)) from None
        except RefusedError as error:
            raise _Refusal(401, str(error)) from None
        except InvalidRequestError as error:
            raise _Refusal(400, str(error)) from None

    async def _obey(self, request: web.BaseRequest, kind: tuple[str, str], seal: Seal) -> _Answer:
        body = await self._read(request)
        check_body(seal.digest, body)
        target = None if kind == _ALL else _parse_target(*kind)
        self._guard.admit(seal, time.monotonic())
        return self._set_all(body) if target is None else await self._perform(request.method, target, body)

    async def _perform(self, method: str, target: _Target, body: bytes) -> _Answer:
        if method == "GET":
            return await self._get(target.key, min(target.wait or 0.0, self._wait_limit))
        if method == "POST":
            return 200, b"%d" % self._store.add(target.key, parse_counter(body))
        if method == "PUT":
            self._store.set(target.key, body)
        else:
            self._store.delete(target.key)
        return 200, b""

    def _set_all(self, body: bytes) -> _Answer:
        self._store.set_all(_parse_values(body))
        return 200, b""

    async def _get(self, key: str, wait: float) -> _Answer:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while (value := self._store.peek(key)) is None:
            if self._closed:
                raise _Refusal(503, "the rendezvous server stops, because its job ends: the log of the driver says why")
            remaining = deadline - loop.time()
            if remaining <= 0:
                return 404, b"the key is not set"
            await self._wait(key, remaining)
        return 200, value

    async def _wait(self, key: str, timeout: float) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, set()).add(waiter)
        self.waiting += 1
        try:
            await asyncio.wait([waiter], timeout=timeout)
        finally:
            self.waiting -= 1
            self._forget(key, waiter)

    def _forget(self, key: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(key, set())
        waiters.discard(waiter)
        if not waiters:
            self._waiters.pop(key, None)

    async def _read(self, request: web.BaseRequest) -> bytes:
        if not request.body_exists:  # most requests; a limit of the time costs a task and a timer
            return b""
        try:
            return await asyncio.wait_for(self._read_up_to_limit(request), _BODY_TIMEOUT)
        except asyncio.TimeoutError:  # on Python 3.10 this is not the builtin TimeoutError
            raise _Refusal(408, f"the body did not arrive within {_BODY_TIMEOUT:g} s") from None
        except web.RequestPayloadError:
            raise _Refusal(400, "the body is not encoded as its headers say") from None
        except ConnectionResetError:
            raise _Refusal(400, "the client ended the connection before the end of the body") from None

    async def _read_up_to_limit(self, request: web.BaseRequest) -> bytes:
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > self._body_limit:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> _Refusal:
        return _Refusal(413, f"the body is larger than the limit of {self._body_limit} bytes")


def _parse_target(method: str, raw_path: str) -> _Target:
    match = _TARGET.fullmatch(raw_path)
    if match is None:
        raise _Refusal(404, "there is only /time, /keys/<key>, with ?wait=<seconds> for GET, and /counters/<key>")
    kind, wait = match["kind"], match["wait"]
    if method not in ({"GET", "PUT", "DELETE"} if kind == "keys" else {"POST"}):
        raise _Refusal(405, f"the method {method} is not for /{kind}/")
    if wait is not None and method != "GET":
        raise _Refusal(400, "only GET can wait")
    return _Target(_parse_key(match["key"]), None if wait is None else float(wait))


def _parse_values(body: bytes) -> dict[str, bytes]:
    try:
        values = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException):
        values = None
    if not isinstance(values, dict) or not all(
        isinstance(key, str) and isinstance(value, bytes) for key, value in values.items()
    ):
        raise _Refusal(400, "the body is not a msgpack map of keys to values")
    return values


def _parse_key(quoted: str) -> str:
    try:
        return check_key(unquote(quoted, errors="strict"))
    except UnicodeDecodeError:
        raise _Refusal(400, "the key is not UTF-8") from None


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
