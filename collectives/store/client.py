"""The store of a job as a worker sees it: every call is one signed HTTP request to the driver."""

from __future__ import annotations

import http.client
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar
from urllib.parse import quote

import msgpack

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    InvalidRequestError,
    NoDescriptorError,
    PeerLostError,
    SettingsError,
    ShutDownError,
)
from collectives.net import descriptors
from collectives.net.attempts import attempts
from collectives.store.host_cache import CacheLostError, HostCache
from collectives.store.memory import check_key, parse_counter
from collectives.store.signing import NO_TIME, RefusedError, ServerTime, check_body, sign, verify_answer

_ERRORS: dict[int, type[Exception]] = {
    400: InvalidRequestError,
    401: SettingsError,
    408: PeerLostError,
    413: InvalidRequestError,
    503: PeerLostError,
}
_STALE = 428
_POLL = 50.0
_ANSWER_GRACE = 5.0
_DIAL_TIMEOUT = 5.0
_ATTEMPTS = 3
MOST_READERS = 512
"""The ranks of a larger world share their reads on each host."""


@dataclass(frozen=True, slots=True)
class _Request:
    """``connect`` and ``answer`` bound the two waits; ``repeatable`` allows sending again on a new connection."""

    method: str
    path: str
    body: bytes | None
    connect: float
    answer: float
    repeatable: bool = True


class RendezvousClient:
    """A :class:`~collectives.api.Store` kept by the RendezvousServer at ``address:port``; for any number of threads.

    Requests and answers are authenticated with ``secret``, and a request works only once; nothing is encrypted, so
    values must not hold anything that others on the network must not read. The clocks of the two hosts do not matter:
    the first call to a server, and each ``add``, asks for its time. Each call opens its own connection. While the
    server cannot be reached, a call tries again for up to ``connect_timeout`` seconds (and :meth:`get` for no more than
    its own timeout and 5 s). All but ``add`` are sent again when a connection breaks under way.

    Every call raises PeerLostError when the server cannot be reached, does not answer or stops; NoDescriptorError
    when this process has no file descriptor left for a connection; SettingsError when the two sides have different
    secrets; InvalidRequestError for a key, value or counter the server refuses; ShutDownError after :meth:`close`. The
    constructor raises SettingsError.
    """

    # The last server whose time is known, and that time: each world has a client of its own, mostly for one server.
    _last: ClassVar[tuple[tuple[str, int, bytes], tuple[ServerTime, float]] | None] = None

    def __init__(self, address: str, port: int, secret: bytes, connect_timeout: float = 30.0) -> None:
        _check_arguments(address, port, secret, connect_timeout)
        self._address = address
        self._port = port
        self._secret = secret
        self._connect_timeout = connect_timeout
        self._where = f"the rendezvous server at {address} port {port}"
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = threading.Event()
        self._cache: HostCache | None = None
        self._server = address, port, secret
        # The time of the server, and when it came; replaced as a whole.
        self._known = self._last[1] if self._last is not None and self._last[0] == self._server else None

    def set(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Create or replace ``key``.

        ``timeout``, in seconds, bounds the connection, and then the answer; None means connect_timeout for each.
        """
        seconds = self._connect_timeout if timeout is None else timeout
        self._expect_done(_Request("PUT", _path("keys", key), bytes(value), seconds, seconds))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Create or replace all keys of ``values``, at once, with one request."""
        body = msgpack.packb({check_key(key): bytes(value) for key, value in values.items()})
        self._expect_done(self._request("PUT", "/keys", body))

    def get(self, key: str, timeout: float) -> bytes:
        """Wait up to ``timeout`` seconds for ``key``; CollectiveTimeoutError when it is not set by then."""
        check_key(key)
        deadline = time.monotonic() + max(timeout, 0.0)
        value = self._shared(key, deadline) if timeout > 0 else self._read(key, deadline)
        if value is None:
            raise CollectiveTimeoutError(
                f"key {key!r} was not set within {timeout:g} s at {self._where}; "
                "look at the rank that sets it, or raise the timeout"
            )
        return value

    def share_reads(self, host: str, size: int) -> None:
        """From now on, if ``size`` ranks are many, those of ``host`` that call this read each key once for all.

        See :mod:`collectives.store.host_cache`. A read with a timeout of 0 always asks the store. Others may give a
        value that is KEEP_SECONDS old.
        """
        with self._lock:
            if self._cache is None and size > MOST_READERS and not self._closed.is_set():
                self._cache = HostCache(f"{self._address}:{self._port}", host, self._secret, self._read)

    def _shared(self, key: str, deadline: float) -> bytes | None:
        if self._cache is not None:
            with suppress(CacheLostError):
                value = self._cache.get(key, deadline)
                if value is not None:
                    return value
        return self._read(key, deadline)  # also where nothing has come in time: the store may be lost, or slow

    def _read(self, key: str, deadline: float) -> bytes | None:
        path = _path("keys", key)
        while True:
            status, value = self._exchange(self._poll(path, max(deadline - time.monotonic(), 0.0)))
            if status == 200:
                return value
            if time.monotonic() >= deadline:
                return None

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``, atomically; after a PeerLostError it may have been added or not."""
        body = b"%d" % amount
        return parse_counter(self._expect_done(self._request("POST", _path("counters", key), body, repeatable=False)))

    def delete(self, key: str) -> None:
        """Remove ``key`` if it exists; one that ends with "/" stands for all keys that begin with it."""
        self._expect_done(self._request("DELETE", _path("keys", key)))

    def close(self) -> None:
        """End every call under way, at once or, while it connects, within 5 s; refuse later ones. From any thread."""
        with self._lock:
            self._closed.set()
            connected = list(self._sockets)
        if self._cache is not None:
            self._cache.close()
        for sock in connected:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, method: str, path: str, body: bytes | None = None, *, repeatable: bool = True) -> _Request:
        return _Request(method, path, body, self._connect_timeout, self._connect_timeout, repeatable)

    def _poll(self, path: str, remaining: float) -> _Request:
        wait = min(remaining, _POLL)
        connect = min(self._connect_timeout, remaining + _ANSWER_GRACE)
        return _Request("GET", f"{path}?wait={wait:.6f}", None, connect, wait + _ANSWER_GRACE)

    def _expect_done(self, request: _Request) -> bytes:
        status, body = self._exchange(request)
        if status != 200:
            raise EngineError(f"{self._where} answered {request.method} with status {status}; report this")
        return body

    def _exchange(self, request: _Request) -> tuple[int, bytes]:
        """Send until there is an answer; the one place that translates connection errors."""
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            may_repeat = attempts > 0
            try:
                with self._connected(request.connect) as connection:
                    moment = self._moment(connection, request)
                    may_repeat = may_repeat and request.repeatable
                    status, body = self._converse(connection, request, moment)
            except RefusedError as error:
                raise self._not_authentic(error) from error
            except TimeoutError as error:
                raise self._lost(f"did not answer within {request.answer:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                self._check_open()
                if not may_repeat:
                    raise self._lost(f"broke the connection ({error!r})") from error
                continue
            if status != _STALE:
                return self._accept(status, body)
            self._known = None
            if not may_repeat:
                raise self._lost(f"refused: {body.decode(errors='replace')}")

    def _moment(self, connection: http.client.HTTPConnection, request: _Request) -> ServerTime:
        """The time of the server now, or a little less.

        A request that is not repeatable always asks for it: so it cannot be refused as stale after it had its effect.
        """
        known = self._known
        if known is None or not request.repeatable:
            status, body = self._converse(connection, _Request("GET", "/time", None, 0.0, request.answer), NO_TIME)
            if status != 200:
                self._accept(status, body)
                raise EngineError(f"{self._where} answered with status {status}; report this")
            known = self._known = (ServerTime.decode(body), time.monotonic())
            RendezvousClient._last = self._server, known
        moment, since = known
        return moment.after(time.monotonic() - since)

    @contextmanager
    def _connected(self, patience: float) -> Iterator[http.client.HTTPConnection]:
        connection = self._connect(patience)
        sock = connection.sock  # the connection forgets it once an answer begins
        try:
            yield connection
        finally:
            with self._lock:
                self._sockets.discard(sock)
            connection.close()

    def _converse(
        self, connection: http.client.HTTPConnection, request: _Request, moment: ServerTime
    ) -> tuple[int, bytes]:
        connection.sock.settimeout(request.answer)
        nonce = secrets.token_hex(16)
        headers = sign(self._secret, request.method, request.path, request.body or b"", moment, nonce)
        if moment != NO_TIME:
            headers["connection"] = "close"
        connection.request(request.method, request.path, request.body, headers)
        with connection.getresponse() as response:
            received = {name.lower(): value for name, value in response.getheaders()}
            digest = verify_answer(self._secret, response.status, nonce, received)
            body = response.read()
        check_body(digest, body)
        return response.status, body

    def _accept(self, status: int, body: bytes) -> tuple[int, bytes]:
        if status in (200, 404):
            return status, body
        text = body.decode(errors="replace")
        raise _ERRORS.get(status, EngineError)(f"{self._where} refused: {text}")

    def _connect(self, patience: float) -> http.client.HTTPConnection:
        problem: Exception | None = None
        for _ in attempts(patience, self._closed.wait):
            self._check_open()
            try:
                return self._dial(min(patience, _DIAL_TIMEOUT))
            except (OSError, UnicodeError) as error:
                if isinstance(error, OSError) and descriptors.are_exhausted(error):
                    raise NoDescriptorError(f"no connection to {self._where}: {descriptors.EXHAUSTED}") from error
                problem = error
        raise self._lost(f"cannot be reached for {patience:g} s ({problem})") from problem

    def _dial(self, timeout: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=timeout)
        connection.connect()
        with self._lock:
            if not self._closed.is_set():
                self._sockets.add(connection.sock)
                return connection
        connection.close()
        raise self._shut_down()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise self._shut_down()

    def _shut_down(self) -> ShutDownError:
        return ShutDownError(f"the client of {self._where} was closed")

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"{self._where} {what}; check that the driver runs and that this host can reach it")

    def _not_authentic(self, error: RefusedError) -> SettingsError:
        return SettingsError(
            f"the answer of {self._where} is not to be trusted ({error}); start this worker with the address, port and "
            "secret of its own job"
        )


def _path(kind: str, key: str) -> str:
    return f"/{kind}/{quote(check_key(key), safe='')}"


def _check_arguments(address: str, port: int, secret: bytes, connect_timeout: float) -> None:
    if not address or not address.isprintable():
        raise SettingsError(f"rendezvous address {address!r} is not a host name or address")
    if not isinstance(port, int) or not 0 < port <= 65535:
        raise SettingsError(
            f"rendezvous port {port!r} is not in 1..65535; use the one that the server's start() returned"
        )
    if not isinstance(secret, bytes) or not secret:
        raise SettingsError("the rendezvous secret must be bytes, and not empty; the launcher hands it to each worker")
    if not connect_timeout > 0:
        raise SettingsError(f"connect_timeout={connect_timeout!r} must be a positive number of seconds")
