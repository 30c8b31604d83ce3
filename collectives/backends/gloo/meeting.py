"""How the members of a Gloo group meet: the device, the store, the group; and what Gloo's errors mean."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgpack

from collectives import interfaces
from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    SettingsError,
    Store,
)
from collectives.backends.gloo.connections import NOWHERE, open_sockets, unconnected_addresses
from collectives.backends.group import Group

__all__ = ["import_torch", "meet", "open_device", "some_of", "translate"]

WORKER_THREADS = 2
"""With one instead of two, a small operation takes milliseconds on a busy machine."""

_device_lock = threading.Lock()


def import_torch() -> Any:
    """Torch with Gloo; ImportError with the remedy where it is missing."""
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise ImportError("the gloo backend needs torch; install it with: pip install 'hvd-cluster[torch]'") from error
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise ImportError("this build of torch has no Gloo; install one that has, or choose another backend")
    return torch


def open_device(interface: str, hostname: str) -> tuple[Any, bytes]:
    """A device of Gloo, which listens on a port of its own, and its address, NOWHERE if that cannot be found out."""
    with _device_lock:
        before = set(open_sockets())
        device = _create_device(interface, hostname)
        addresses = unconnected_addresses(set(open_sockets()) - before)
    return device, addresses.pop() if len(addresses) == 1 else NOWHERE


def meet(group: Group, store: Store, timeout: float, device: Any) -> Any:
    """A connected ProcessGroupGloo. Raises CollectiveTimeoutError when a member does not come."""
    gloo = import_torch().distributed.ProcessGroupGloo
    options = gloo._Options()
    options._threads = WORKER_THREADS
    options._timeout = timedelta(seconds=timeout)
    options._devices = [device]
    try:
        return gloo(_directory_class()(group, store, timeout), group.position, group.size, options)
    except Exception as error:
        raise translate(error, group) from error


def some_of(group: Group) -> str:
    """The other members, for a message: Gloo does not say which of them it means."""
    return ("" if group.size < 3 else "at least one of ") + group.describe(group.others)


def translate(error: Exception, group: Group) -> Exception:
    """Our error for what Gloo raised in ``group``. Gloo's errors differ in their text only."""
    if isinstance(error, (HorovodInternalError, SettingsError)):
        return error
    text = str(error)
    if "Timed out" in text or "timeout" in text:
        return CollectiveTimeoutError(
            f"{some_of(group)} did not answer in time; look there, or raise the timeout ({text})"
        )
    if "/transport/" in text or "onnect" in text:
        return PeerLostError(f"the connection to {some_of(group)} broke; form a new job ({text})")
    return EngineError(f"Gloo refused what it was asked to do; report this ({text})")


def _create_device(interface: str, hostname: str) -> Any:
    gloo = import_torch().distributed.ProcessGroupGloo
    if not interface and not hostname:
        return gloo.create_default_device()
    try:
        return gloo.create_device(interface=interface) if interface else gloo.create_device(hostname=hostname)
    except RuntimeError as error:
        allowed = ", ".join(interfaces.names())
        raise SettingsError(
            f"Gloo cannot listen on {interface or hostname!r} ({error}); the interfaces of this host are: {allowed}"
        ) from error


@functools.cache
def _directory_class() -> Any:
    """The class that shows a Store of ours to torch; made here, because its base exists only once torch is imported."""
    store_class: Any = import_torch().distributed.Store

    class Directory(store_class):  # type: ignore[misc]
        """Where each member listens: Gloo sets one key "0/rank" and reads all of them.

        Rank 0 collects them and publishes a list, so that a group of P costs the store 3 P requests, not P * P.
        """

        def __init__(self, group: Group, store: Store, timeout: float) -> None:
            super().__init__()
            self._group = group
            self._store = store
            self._timeout = timeout
            self._entries: list[bytes] = []

        def set(self, key: str, value: bytes) -> None:
            self._store.set(f"member/{self._group.position}", bytes(value))

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            if not self._entries:
                self._entries = self._collect() if self._group.position == 0 else self._read()

        def get(self, key: str) -> bytes:
            return self._entries[int(key.rpartition("/")[2])]

        def _collect(self) -> list[bytes]:
            entries = [self._store.get(f"member/{rank}", self._timeout) for rank in range(self._group.size)]
            self._store.set("members", msgpack.packb(entries))
            return entries

        def _read(self) -> list[bytes]:
            entries: list[bytes] = msgpack.unpackb(self._store.get("members", self._timeout))
            return entries

    return Directory
