"""The store of a job as an HTTP service in the driver: its thread, its listening socket, and the end of both."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from collectives.api import SettingsError
from collectives.net.interfaces import listen
from collectives.store.memory import MemoryStore

if TYPE_CHECKING:
    from collectives.store.service import HttpServer

_log = logging.getLogger(__name__)


_BODY_LIMIT = 16 << 20
_WAIT_LIMIT = 60.0
_START_TIMEOUT = 30.0


class RendezvousServer:
    """Serves one store on ``host:port`` (port 0: any free one) to clients that know ``secret``.

    Owns one daemon thread, "hvd-rendezvous": :meth:`start` starts it, :meth:`stop` ends it and waits for that, at most
    ``2 * stop_timeout + 5`` seconds, of which an answer under way gets ``stop_timeout``.

    A waiting worker costs one connection (a file descriptor) and no thread. A request body has at most ``body_limit``
    bytes, and a long-poll lasts at most ``wait_limit`` seconds. :mod:`collectives.store.service` says how
    connections that send no signed request are limited. Raises SettingsError for an argument that cannot be used.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        body_limit: int = _BODY_LIMIT,
        wait_limit: float = _WAIT_LIMIT,
        stop_timeout: float = 2.0,
    ) -> None:
        # Workers import this module, too, but have no server: their start shall not wait for aiohttp, 0.15 s.
        from collectives.store.service import HttpServer, Service

        _check_arguments(secret, host, port)
        for name, value in (("body_limit", body_limit), ("wait_limit", wait_limit), ("stop_timeout", stop_timeout)):
            if not value > 0:
                raise SettingsError(f"rendezvous {name}={value!r} must be a positive number")
        self._host = host
        self._port = port
        self._stop_timeout = stop_timeout
        self._store = MemoryStore()
        self._service = Service(secret, self._store, body_limit, wait_limit)
        self._thread: threading.Thread | None = None
        self._kind = HttpServer
        self._connections: HttpServer | None = None
        self._request_stop: Callable[[], object] = lambda: None

    @property
    def address(self) -> str:
        """The host that it listens on. Workers cannot use a wildcard such as 0.0.0.0 or :: as an address."""
        return self._host

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return self._port

    @property
    def store(self) -> MemoryStore:
        """The same keys for the driver, without the network; usable before :meth:`start` and after :meth:`stop`."""
        return self._store

    @property
    def waiting(self) -> int:
        """Number of long-polls that wait for a key at this moment."""
        return self._service.waiting

    def start(self) -> int:
        """Listen, and return the port. Raises SettingsError when it cannot listen there, or was started before."""
        if self._thread is not None:
            raise SettingsError("this rendezvous server was started before; make a new one")
        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        started: Future[Callable[[], object]] = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, started), name="hvd-rendezvous", daemon=True)
        self._thread.start()
        self._request_stop = started.result(_START_TIMEOUT)
        _log.info("rendezvous server listens on %s port %d", self._host, self._port)
        return self._port

    def stop(self) -> None:
        """Answer pending long-polls with 503, close every connection and end the thread. Any number of times."""
        if self._thread is None:
            return
        with suppress(RuntimeError):  # the loop is closed: it was stopped before
            self._request_stop()
        self._thread.join(2 * self._stop_timeout + 5.0)
        if self._thread.is_alive():
            _log.error("rendezvous server on %s port %d does not end; it is abandoned", self._host, self._port)

    def disown(self) -> None:
        """In a forked child: close this copy of the sockets; the parent goes on to serve. Takes no lock."""
        self._thread, connections = None, self._connections
        if connections is not None:
            connections.disown()

    def __enter__(self) -> RendezvousServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, listener: socket.socket, started: Future[Callable[[], object]]) -> None:
        try:
            asyncio.run(self._serve(listener, started))
        except OSError as error:
            if started.done():
                raise
            listener.close()
            started.set_exception(SettingsError(f"the rendezvous server cannot start ({error}); look at ulimit -n"))

    async def _serve(self, listener: socket.socket, started: Future[Callable[[], object]]) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        server = self._connections = self._kind(self._service, listener)
        server.start()
        unsubscribe = self._store.subscribe(lambda key: loop.call_soon_threadsafe(self._service.wake, key))
        started.set_result(functools.partial(loop.call_soon_threadsafe, stop.set))
        await stop.wait()
        unsubscribe()
        self._service.close()
        await server.close(self._stop_timeout)


def _check_arguments(secret: bytes, host: str, port: int) -> None:
    if not isinstance(secret, bytes) or not secret:
        raise SettingsError("the rendezvous secret must be bytes, and not empty; make one with secrets.token_bytes(32)")
    if not host or not host.isprintable():
        raise SettingsError(f"rendezvous host {host!r} is not a host name or address of this machine")
    if not isinstance(port, int) or not 0 <= port <= 65535:
        raise SettingsError(f"rendezvous port {port!r} is not in 0..65535 (0: any free one)")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise SettingsError(
            f"the rendezvous server cannot listen on {host} port {port} ({error}); "
            "name an address of this host, and a port that is free or 0"
        ) from error
