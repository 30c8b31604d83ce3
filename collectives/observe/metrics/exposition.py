"""Serves the metrics of this process to Prometheus."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from collectives.net.acceptor import Acceptor, streams
from collectives.net.interfaces import listen
from collectives.observe.metrics.families import Family, Rising, families
from collectives.observe.metrics.meter import Meter

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
RETRY_SECONDS = 0.1
RETRIES = 20
"""When the ranks of an elastic job change their numbers, one may still have the port of another for a moment."""
MOST_CLIENTS = 64
BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

_Application = Callable[[dict[str, str], Callable[..., object]], Any]


class Exposition:
    """The metrics of ``meter`` in Prometheus' text format at http://``address``:``port``/metrics, until :meth:`close`.

    Any number of clients are served at once, up to MOST_CLIENTS. Nobody authenticates here: a client that has not got
    its answer within the deadline of :mod:`collectives.net.strangers` loses its connection. A port that cannot
    be had is one line in the log.
    """

    def __init__(self, meter: Meter, address: str, port: int) -> None:
        self.address = address
        self.port = port
        self._meter = meter
        self._listener: socket.socket | None = None
        # Owned by the exposition; set by close().
        self._closing = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        # Owned by the exposition, ended and joined by close().
        self._thread = threading.Thread(target=self._run, name="hvd-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Release the port."""
        self._closing.set()
        with suppress(RuntimeError):  # the loop has ended
            self._stop()
        self._thread.join(CLOSE_SECONDS)

    def disown(self) -> None:
        """In a forked child, which has no thread: close this copy of the socket."""
        if self._listener is not None:
            self._listener.close()

    # On its thread.

    def _run(self) -> None:
        try:
            application = _application(self._meter)
        except ImportError:
            logger.warning('no metrics for Prometheus: install prometheus_client: pip install "hvd-cluster[metrics]"')
            return
        try:
            listener = self._listener = self._bind()
        except OSError as error:
            logger.warning(
                "no metrics at %s:%d: %s; set HVD_METRICS_PORT to a free port, HVD_METRICS_ADDRESS to an address of "
                "this host. Training goes on without them",
                self.address,
                self.port,
                _reason(error),
            )
            return
        with listener:
            asyncio.run(self._serve(listener, application))

    def _bind(self) -> socket.socket:
        for _ in range(RETRIES):
            try:
                return listen(self.address, self.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or self._closing.wait(RETRY_SECONDS):
                    raise
        return listen(self.address, self.port)

    async def _serve(self, listener: socket.socket, application: _Application) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = functools.partial(loop.call_soon_threadsafe, stop.set)
        clients: set[StreamWriter] = set()
        attend = functools.partial(_attend, application, clients)
        async with Acceptor(listener, streams(attend), "the metrics", MOST_CLIENTS):
            if not self._closing.is_set():
                await stop.wait()
        for writer in clients:
            writer.transport.abort()


def _reason(error: Exception) -> str:
    """Without the address that Python adds."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


async def _attend(
    application: _Application, clients: set[StreamWriter], reader: StreamReader, writer: StreamWriter
) -> None:
    """Answer the one request of a connection. Bound and abort: the acceptor ends it at its deadline."""
    clients.add(writer)
    try:
        writer.write(_answer(application, await reader.readuntil(b"\r\n\r\n")))
        await writer.drain()
    except (OSError, EOFError, asyncio.LimitOverrunError):
        logger.debug("a client of the metrics went away", exc_info=True)
    finally:
        clients.discard(writer)
        writer.close()


def _answer(application: _Application, head: bytes) -> bytes:
    """The whole answer of ``application``, a function of WSGI, to the request with this ``head``."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3:
        return BAD_REQUEST
    path, _, query = words[1].partition("?")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    environ = {"REQUEST_METHOD": words[0], "PATH_INFO": path, "QUERY_STRING": query}
    for name in ("accept", "accept-encoding"):
        if name in headers:
            environ["HTTP_" + name.upper().replace("-", "_")] = headers[name]
    begun: list[str] = []

    def start(status: str, answered: list[tuple[str, str]]) -> None:
        begun[:] = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in answered)]

    body = b"".join(application(environ, start))
    return "\r\n".join([*begun, f"Content-Length: {len(body)}", "Connection: close", "", ""]).encode("latin-1") + body


def _application(meter: Meter) -> _Application:
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(meter))
    application: _Application = make_wsgi_app(registry)
    return application


class _Collector:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._rising = Rising()

    def collect(self) -> Iterator[Metric]:
        """The present numbers, for ``prometheus_client``."""
        if self._meter.has_begun:
            yield from map(_metric, map(self._rising.of, families(self._meter.read())))


def _metric(family: Family) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric
