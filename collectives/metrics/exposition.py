"""Serves the metrics of this process to Prometheus."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from collectives.metrics.families import Family, Rising, families
from collectives.metrics.meter import Meter

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["Exposition"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How long an end waits for the server at most."""
CLOSE_SECONDS = 5.0
RETRY_SECONDS = 0.1
RETRIES = 20
"""When the ranks of an elastic job change their numbers, one may still have the port of another for a moment."""


class Exposition:
    """The metrics of ``meter`` in Prometheus' text format at http://``address``:``port``/metrics, until :meth:`close`.

    A port that cannot be had is one line in the log.
    """

    def __init__(self, meter: Meter, address: str, port: int) -> None:
        self.address = address
        self.port = port
        self._meter = meter
        self._server: WSGIServer | None = None
        # Owned by the exposition; set by close().
        self._closing = threading.Event()
        # Owned by the exposition, joined by close(); it serves, and looks for the end every POLL_SECONDS.
        self._thread = threading.Thread(target=self._run, name="hvd-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Release the port."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def disown(self) -> None:
        """In a forked child, which has no thread: close this copy of the socket."""
        if self._server is not None:
            self._server.socket.close()

    # On its thread.

    def _run(self) -> None:
        try:
            app = _application(self._meter)
        except ImportError:
            logger.warning('no metrics for Prometheus: install prometheus_client: pip install "hvd-cluster[metrics]"')
            return
        try:
            self._server = server = self._bind(app)
        except (OSError, ValueError) as error:  # ValueError: a text that is no name of a host
            logger.warning(
                "no metrics at %s:%d: %s; set HVD_METRICS_PORT to a free port, HVD_METRICS_ADDRESS to an address of "
                "this host. Training goes on without them",
                self.address,
                self.port,
                getattr(error, "strerror", None) or error,
            )
            return
        with server:
            self._serve(server)

    def _bind(self, app: Callable[..., Any]) -> WSGIServer:
        for _ in range(RETRIES):
            try:
                return make_server(self.address, self.port, app, _server_for(self.address), _Handler)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or self._closing.wait(RETRY_SECONDS):
                    raise
        return make_server(self.address, self.port, app, _server_for(self.address), _Handler)

    def _serve(self, server: WSGIServer) -> None:
        server.timeout = POLL_SECONDS
        while not self._closing.is_set():
            server.handle_request()


class _Server(WSGIServer):
    """A client that says nothing must not hold up the end, and no name server the beginning."""

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def get_request(self) -> Any:
        connection, address = super().get_request()
        connection.settimeout(CLOSE_SECONDS / 2)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client of the metrics at %s went away", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_for(address: str) -> type[_Server]:
    return _Server6 if ":" in address else _Server


class _Handler(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        return


def _application(meter: Meter) -> Callable[..., Any]:
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(meter))
    return make_wsgi_app(registry)


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
