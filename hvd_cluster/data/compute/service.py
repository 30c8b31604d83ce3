"""The meeting point of a data service: a signed store, and a watch over the processes that serve."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

import msgpack

from collectives import LOOPBACK, CollectiveTimeoutError, RendezvousServer, SettingsError, interfaces
from executors import ExecutorError, JobSecret
from hvd_cluster.data.compute.presence import END, PLAN, PresenceServer

__all__ = ["ComputeService"]

FAREWELL_SECONDS = 5.0
# The end of a block with an error often follows from the loss of another process, which is the better reason.
LOSS_SECONDS = 1.0

logger = logging.getLogger(__name__)


class ComputeService:
    """Serves from its construction until :meth:`shutdown`, on all interfaces of this host, to those that know ``key``.

    As a context manager it shuts down with its block, and fails if the block raises.

    Args:
        dispatchers: number of dispatchers of the data service, at least 1.
        workers_per_dispatcher: number of workers of each of them, at least 1.
        key: the secret that signs all requests and answers.
        nics: names of the interfaces whose addresses :meth:`addresses` gives; None means all.

    Requests that are not signed with ``key`` are refused, logged, and change nothing. Raises ValueError for a number
    that is not allowed, SettingsError for an interface without an address, ExecutorError where it cannot listen.
    """

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Iterable[str] | None = None
    ) -> None:
        for name, value in (("dispatchers", dispatchers), ("workers_per_dispatcher", workers_per_dispatcher)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        self._hosts = _hosts(nics)
        self._server = RendezvousServer(key, interfaces.everywhere())
        self._presence = PresenceServer(JobSecret(key), self.fail)
        plan = dispatchers, workers_per_dispatcher, self._presence.start()
        self._server.store.set(PLAN, msgpack.packb(plan))
        try:
            self._server.start()
        except BaseException:
            self._presence.stop()
            raise

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """The addresses and ports at which clients may reach it, by the name of the interface."""
        return {name: [(host, self._server.port)] for name, host in self._hosts.items()}

    def get_port(self) -> int:
        """The port of its addresses."""
        return self._server.port

    def fail(self, reason: str) -> None:
        """Let all that wait for the end, now or later, raise an error with ``reason``. Only the first one counts."""
        if self._server.store.peek(END) is None:
            logger.error("the data service ends: %s", reason)
            self._server.store.set(END, reason.encode())

    def reason(self, seconds: float) -> str:
        """Why it fails, if that is known within ``seconds``; else empty."""
        with suppress(CollectiveTimeoutError):
            return self._server.store.get(END, seconds).decode()
        return ""

    def shutdown(self) -> None:
        """Let all that wait for the end go on, give them up to 5 s to leave, and close all sockets.

        Any number of times.
        """
        if self._server.store.peek(END) is None:
            self._server.store.set(END, b"")
        if not self._presence.wait_until_empty(FAREWELL_SECONDS):
            logger.warning("processes of the data service are still there %g s after its end", FAREWELL_SECONDS)
        self._presence.stop()
        self._server.stop()

    def __enter__(self) -> ComputeService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self.reason(LOSS_SECONDS):
            self.fail(f"the process of the compute service ends with {error!r}")
        self.shutdown()


def _hosts(nics: Iterable[str] | None) -> dict[str, str]:
    """The address of each interface, those for other hosts first."""
    if nics is not None:
        return {name: interfaces.address_of(name) for name in nics}
    found = {}
    for name in interfaces.names():
        with suppress(SettingsError):
            found[name] = interfaces.address_of(name)
    if not found:
        raise ExecutorError("no network interface of this host has an address, so nobody can reach a compute service")
    return dict(sorted(found.items(), key=lambda item: item[1] == LOOPBACK))
