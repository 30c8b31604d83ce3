"""How the members of a Gloo group connect: each offers the address of its device, and its entry for Gloo's store."""

from __future__ import annotations

import functools
import os
import select
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from collectives.api import HorovodInternalError, override
from collectives.backends.base import Bootstrap, Group
from collectives.backends.gloo.connections import NOWHERE, Connections, open_sockets, unconnected_addresses
from collectives.backends.gloo.library import cannot_listen, import_torch, pack_offer, translate, unpack_offers
from collectives.backends.gloo.transport import GlooTransport
from collectives.backends.messaging import MessagingBackend
from collectives.net import interfaces
from collectives.net.attempts import ConnectAttempt

BINDING = "torch"
WORKER_THREADS = 2
"""With one thread instead of two, a small operation takes milliseconds on a busy machine."""
CONNECT_SECONDS = 1.0
"""Gloo makes five attempts of this length to connect to a member, in seconds; nothing can end them earlier."""
PUBLISH_SECONDS = 10.0
LOOK_SECONDS = 0.2
"""How often a construction that waits for the entries of the members looks whether the process ends."""

_device_lock = threading.Lock()


class GlooBootstrap(Bootstrap):
    """A :class:`Bootstrap`.

    ``timeout`` bounds the silence of a peer within an operation, in seconds. ``address`` is the IP address of this host
    that the peers connect to: anyone who reaches it can disturb or join the exchange. Raises ImportError without torch,
    SettingsError for an address that this host does not have.
    """

    def __init__(self, group: Group, timeout: float, address: str = interfaces.LOOPBACK) -> None:
        import_torch()
        device, end = open_device(address)
        self._timeout = timeout
        self._connections = Connections(end)
        self._construction = _Construction(group, device, timeout)
        try:
            super().__init__(group, pack_offer(BINDING, end, self._construction.begin()))
        except BaseException:
            self._construction.close()
            raise

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> MessagingBackend:
        addresses, entries = zip(*unpack_offers(BINDING, offers, self.group), strict=True)
        peers = frozenset(addresses) - {NOWHERE}
        try:
            process_group = self._construction.finish(entries, attempt)
        except BaseException:
            self._connections.find(peers)
            self._connections.shut_down()
            raise
        self._connections.find(peers)
        return MessagingBackend(GlooTransport(self.group, process_group, self._connections, self._timeout))

    @override
    def close(self) -> None:
        self._construction.close()


class _Construction:
    """The construction of a ProcessGroupGloo, which blocks until the members have connected, on a thread of its own."""

    def __init__(self, group: Group, device: Any, timeout: float) -> None:
        self._group = group
        self._timeout = timeout
        self._directory = _directory_class()()
        self._result: Any = None
        self._error: Exception | None = None
        # Held for a few instructions; owned by this construction.
        self._lock = threading.Lock()
        self._done: int | None = None
        # Owned by this construction. It waits for the entries of the members, which close() ends, and then at most five
        # times CONNECT_SECONDS inside Gloo. Nothing ends this second wait: Gloo does not read its store then, an end of
        # its connections makes it try again, and an end of its listening socket ends the process. So it may outlive a
        # failed start. Not a daemon: the process would abort if it ended inside Gloo.
        self._thread = threading.Thread(target=self._construct, args=(device,), name="hvd-gloo-connect")

    def begin(self) -> bytes:
        """Start the construction; the entry that Gloo publishes for the other members."""
        self._done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()
        if self._directory.published.wait(PUBLISH_SECONDS):
            entry: bytes = self._directory.entry
            return entry
        if self._error is not None:
            raise translate(self._error, self._group)
        raise HorovodInternalError("Gloo did not give its address in time")

    def finish(self, entries: Sequence[bytes], attempt: ConnectAttempt) -> Any:
        """The process group, once all members have connected; ``entries`` are those that they published."""
        self._directory.hand_over(entries)
        done = self._done
        if done is None or not attempt.wait({done: select.POLLIN}):
            raise self._group.late("did not connect to Gloo in time")
        with self._lock:
            result, self._result = self._result, None
        if self._error is not None:
            raise translate(self._error, self._group) from self._error
        return result

    def close(self) -> None:
        """Abandon a construction that is under way."""
        self._directory.abandon()
        with self._lock:
            done, self._done, self._result = self._done, None, None
        if done is not None:
            os.close(done)

    def _construct(self, device: Any) -> None:
        gloo = import_torch().distributed.ProcessGroupGloo
        options = gloo._Options()
        options._threads = WORKER_THREADS
        options._timeout = timedelta(seconds=min(CONNECT_SECONDS, self._timeout))
        options._devices = [device]
        try:
            result = gloo(self._directory, self._group.position, self._group.size, options)
            result._set_default_timeout(timedelta(seconds=self._timeout))
            self._finish(result, None)
        except Exception as error:  # noqa: BLE001 - for the waiting thread
            self._finish(None, error)
        finally:
            self._directory.published.set()

    def _finish(self, result: Any, error: Exception | None) -> None:
        with self._lock:
            if self._done is not None:
                # Without the traceback, which holds the device.
                self._result, self._error = result, error and error.with_traceback(None)
                os.eventfd_write(self._done, 1)


def open_device(address: str) -> tuple[Any, bytes]:
    """A device of Gloo, which listens on its own port of ``address``, and the sockaddr of that port.

    The latter is NOWHERE if it cannot be determined.
    """
    with _device_lock:
        before = set(open_sockets())
        device = _create_device(address)
        addresses = unconnected_addresses(set(open_sockets()) - before)
    return device, addresses.pop() if len(addresses) == 1 else NOWHERE


def _create_device(address: str) -> Any:
    try:
        return import_torch().distributed.ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        raise cannot_listen(error, address) from error


@functools.cache
def _directory_class() -> Any:
    """The store that Gloo uses; made here, because its base class exists only once torch is imported."""
    store_class: Any = import_torch().distributed.Store

    class Directory(store_class):  # type: ignore[misc]
        """Gloo sets its own entry under "0/position", then reads the entries of all members."""

        def __init__(self) -> None:
            super().__init__()
            self.entry = b""
            self.published = threading.Event()
            self._entries: Sequence[bytes] = ()
            # Owned by this directory; set by hand_over() or abandon(), one of which its owner calls
            # unless the process ends.
            self._complete = threading.Event()

        def hand_over(self, entries: Sequence[bytes]) -> None:
            self._entries = entries
            self._complete.set()

        def abandon(self) -> None:
            self._complete.set()

        def set(self, key: str, value: bytes) -> None:
            self.entry = bytes(value)
            self.published.set()

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            while not self._complete.wait(LOOK_SECONDS) and threading.main_thread().is_alive():
                continue  # the interpreter ends threads like this one before its exit handlers, which close the group
            if not self._entries:
                raise RuntimeError("the group is not needed any more")

        def get(self, key: str) -> bytes:
            return self._entries[int(key.rpartition("/")[2])]

    return Directory
