"""The compute service as all other processes see it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import msgpack

from collectives import CollectiveTimeoutError, PeerLostError, RendezvousClient, SettingsError, ShutDownError, attempts
from executors import ExecutorError, JobSecret, StartTimeoutError
from hvd_cluster.data.compute import presence
from hvd_cluster.data.compute.presence import Presence

__all__ = ["ComputeClient"]

PROBE_SECONDS = 2.0
# Between the two messages of a process that registers; if it dies in between, its presence is lost, too.
CLAIM_SECONDS = 10.0

logger = logging.getLogger(__name__)


class _Plan(NamedTuple):
    dispatchers: int
    workers_per_dispatcher: int
    presence_port: int


class ComputeClient:
    """Calls the :class:`ComputeService` at one of ``addresses``, which are those that its ``addresses()`` gave.

    ``key`` is the secret of the service. With ``verbose`` of 2 or more, registrations are logged. The first call finds
    the service; it, and calls while the service cannot be reached, try for up to ``timeout`` seconds. Any thread may
    use it, and :meth:`close` from another thread ends each of its waits with ShutDownError.

    Every call raises SettingsError if the service has another key, and ExecutorError if it cannot be reached.
    """

    def __init__(
        self, addresses: Mapping[str, Sequence[tuple[str, int]]], key: bytes, verbose: int = 1, *, timeout: float = 30.0
    ) -> None:
        self._candidates = list(dict.fromkeys((host, port) for pairs in addresses.values() for host, port in pairs))
        self._key = key
        self._level = logging.INFO if verbose > 1 else logging.DEBUG
        self._timeout = timeout
        # Held while the service is looked for: timeout seconds at most; close() ends that, too.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._found: tuple[RendezvousClient, _Plan, str] | None = None

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Say that dispatcher ``dispatcher_id`` serves at ``dispatcher_address``, ``host:port``; twice changes nothing.

        Raises IndexError if there is no dispatcher of that number, ValueError if it has another address already.
        """
        with self._calling(dispatcher_id) as store:
            if store.add(presence.claims(dispatcher_id), 1) == 1:
                store.set(presence.address(dispatcher_id), dispatcher_address.encode())
                logger.log(self._level, "dispatcher %d serves at %s", dispatcher_id, dispatcher_address)
                return
            known = store.get(presence.address(dispatcher_id), CLAIM_SECONDS).decode()
        if known != dispatcher_address:
            raise ValueError(
                f"dispatcher {dispatcher_id} is registered at {known} already, so not at {dispatcher_address}; "
                "start a new compute service for new dispatchers"
            )

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """The address of the dispatcher, ``host:port``, once it is registered.

        Raises IndexError if there is no dispatcher of that number, StartTimeoutError after ``timeout`` seconds.
        """
        with self._calling(dispatcher_id, f"dispatcher {dispatcher_id} has not registered", timeout) as store:
            return store.get(presence.address(dispatcher_id), timeout).decode()

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Say that the worker ``worker_id`` works for the dispatcher; twice changes nothing. Raises IndexError."""
        with self._calling(dispatcher_id) as store:
            if store.add(presence.worker(dispatcher_id, worker_id), 1) > 1:
                return
            logger.log(self._level, "worker %d serves for dispatcher %d", worker_id, dispatcher_id)
            if store.add(presence.workers(dispatcher_id), 1) == self._plan().workers_per_dispatcher:
                store.set(presence.complete(dispatcher_id), b"")

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for all workers of the dispatcher.

        Raises IndexError if there is no dispatcher of that number, StartTimeoutError after ``timeout`` seconds.
        """
        text = f"dispatcher {dispatcher_id} has not all of its workers"
        with self._calling(dispatcher_id, text, timeout) as store:
            store.get(presence.complete(dispatcher_id), timeout)

    def enter(self, dispatcher_id: int) -> None:
        """Count this process as a reader of the dispatcher until :meth:`leave`. Raises IndexError."""
        with self._calling(dispatcher_id) as store:
            store.add(presence.users(dispatcher_id), 1)

    def leave(self, dispatcher_id: int) -> bool:
        """Whether this process was the last reader of the dispatcher. Raises IndexError."""
        with self._calling(dispatcher_id) as store:
            is_last = store.add(presence.users(dispatcher_id), -1) == 0
            if is_last:
                store.set(presence.free(dispatcher_id), b"")
            return is_last

    def wait_until_free(self, dispatcher_id: int, timeout: float) -> None:
        """Wait for the last reader to leave. Raises IndexError, StartTimeoutError after ``timeout`` seconds."""
        with self._calling(dispatcher_id, f"others still read from dispatcher {dispatcher_id}", timeout) as store:
            store.get(presence.free(dispatcher_id), timeout)

    @contextmanager
    def present(self, name: str, silence: float) -> Iterator[None]:
        """Let the service fail, with ``name`` in its reason, if this process ends inside of the block.

        So it does if this process is silent for ``silence`` seconds.
        """
        with self._calling():
            _, plan, host = self._service()
        try:
            presence = Presence(host, plan.presence_port, JobSecret(self._key), name, silence)
        except OSError as error:
            raise ExecutorError(f"{name} cannot tell the compute service at {host} that it lives ({error})") from error
        try:
            yield
        finally:
            presence.close()

    def shutdown(self) -> None:
        """End the data service: all that wait for its end go on."""
        with self._calling() as store:
            store.set(presence.END, b"")

    def wait_for_shutdown(self, timeout: float | None = None) -> None:
        """Wait for the end of the data service; for ever with None, as long as the service can be reached.

        Raises ExecutorError with the reason if the service fails, such as the loss of one of its processes, or cannot
        be reached any more, and StartTimeoutError after ``timeout`` seconds.
        """
        seconds = math.inf if timeout is None else timeout
        with self._calling(waiting="the data service has not ended", timeout=seconds) as store:
            reason = store.get(presence.END, seconds).decode()
        if reason:
            raise ExecutorError(f"the data service has failed: {reason}")

    def close(self) -> None:
        """End all waits and refuse later calls. Any number of times."""
        self._closed.set()
        found = self._found
        if found is not None:
            found[0].close()

    def __enter__(self) -> ComputeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _calling(
        self, dispatcher_id: int | None = None, waiting: str = "a registration is incomplete", timeout: float = 0.0
    ) -> Iterator[RendezvousClient]:
        """The store; the one place that translates its errors, because an elastic job would retry after them."""
        store, plan, host = self._service()
        if dispatcher_id is not None and not 0 <= dispatcher_id < plan.dispatchers:
            raise IndexError(f"there is no dispatcher {dispatcher_id}: they are numbered 0 to {plan.dispatchers - 1}")
        try:
            yield store
        except CollectiveTimeoutError as error:
            raise self._late(store, waiting, timeout) from error
        except PeerLostError as error:
            raise ExecutorError(f"the compute service at {host} is lost: {error}") from error

    def _late(self, store: RendezvousClient, waiting: str, timeout: float) -> ExecutorError:
        try:
            reason = store.get(presence.END, 0.0).decode() or "it has ended"
        except (CollectiveTimeoutError, PeerLostError):
            return StartTimeoutError(f"{waiting} within {timeout:g} s; look at the log of the compute job")
        return ExecutorError(f"{waiting}, and never will: the data service does not run any more: {reason}")

    def _plan(self) -> _Plan:
        return self._service()[1]

    def _service(self) -> tuple[RendezvousClient, _Plan, str]:
        with self._lock:
            if self._found is None:
                self._found = self._find()
            if self._closed.is_set():
                self._found[0].close()
                raise ShutDownError("this compute client was closed")
            return self._found

    def _find(self) -> tuple[RendezvousClient, _Plan, str]:
        problems: dict[str, Exception] = {}
        for remaining in attempts(self._timeout, self._closed.wait):
            for host, port in self._candidates:
                if self._closed.is_set():
                    raise ShutDownError("this compute client was closed")
                try:
                    plan = self._ask(host, port, min(remaining, PROBE_SECONDS) or PROBE_SECONDS)
                    return RendezvousClient(host, port, self._key, self._timeout), plan, host
                except (PeerLostError, SettingsError) as error:
                    problems[f"{host} port {port}"] = error
            if problems and all(isinstance(each, SettingsError) for each in problems.values()):
                raise SettingsError("; ".join(map(str, problems.values())))
        raise self._unreachable(problems)

    def _ask(self, host: str, port: int, seconds: float) -> _Plan:
        with RendezvousClient(host, port, self._key, seconds) as client:
            return _Plan(*msgpack.unpackb(client.get(presence.PLAN, seconds)))

    def _unreachable(self, problems: Mapping[str, Exception]) -> ExecutorError:
        tried = "; ".join(f"{where}: {error}" for where, error in problems.items())
        return ExecutorError(
            f"the compute service cannot be reached for {self._timeout:g} s ({tried or 'it has no address'}); check "
            "that the compute job runs, and that its configuration is the one of this run"
        )
