"""How the members of a Gloo group meet: the device, the store, the group; and what Gloo's errors mean."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgpack

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    SettingsError,
    Store,
)
from collectives.backends.gloo.connections import listeners

__all__ = ["import_torch", "meet", "open_device", "translate"]

WORKER_THREADS = 2
_DEVICE_LOCK = threading.Lock()


def _open_device(interface: str, hostname: str) -> tuple[Any, str]:
    """A device of Gloo, which listens on a port of its own, and its address ("" if that cannot be found out)."""
    with _DEVICE_LOCK:
        before = _listeners()
        device = _create_device(interface, hostname)
        opened = _listeners() - before
    return device, opened.pop() if len(opened) == 1 else ""


def _listeners() -> set[str]:
    return {local for _, _, (local, _, listening) in _tcp_sockets() if listening}


def _create_device(interface: str, hostname: str) -> Any:
    gloo = _import_torch().distributed.ProcessGroupGloo
    if not interface and not hostname:
        return gloo.create_default_device()
    try:
        return gloo.create_device(interface=interface) if interface else gloo.create_device(hostname=hostname)
    except RuntimeError as error:
        allowed = ", ".join(name for _, name in socket.if_nameindex())
        raise SettingsError(
            f"Gloo cannot listen on {interface or hostname!r} ({error}); the interfaces of this host are: {allowed}"
        ) from error


def _connect(rank: int, size: int, store: Store, timeout: float, device: Any) -> Any:
    gloo = _import_torch().distributed.ProcessGroupGloo
    options = gloo._Options()
    options._threads = WORKER_THREADS
    options._timeout = timedelta(seconds=timeout)
    options._devices = [device]
    try:
        return gloo(_adapter()(store, timeout), rank, size, options)
    except Exception as error:
        raise _translate(error) from error


def _import_torch() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise ImportError("the gloo backend needs torch; install it with: pip install 'hvd-cluster[torch]'") from error
    if not torch.distributed.is_gloo_available():
        raise ImportError("this build of torch has no Gloo; install one that has, or choose another backend")
    return torch


@functools.cache
def _adapter() -> Any:
    """The class that shows a Store of ours to torch. Torch calls it on the thread that builds the group."""
    store_class: Any = _import_torch().distributed.Store

    class Adapter(store_class):  # type: ignore[misc]
        def __init__(self, store: Store, timeout: float) -> None:
            super().__init__()
            self._store = store
            self._timeout = timeout
            self._values: dict[str, bytes] = {}

        def set(self, key: str, value: bytes) -> None:
            self._store.set(key, bytes(value))

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            seconds = self._timeout if timeout is None else timeout.total_seconds()
            for key in keys:
                self._values[key] = self._store.get(key, seconds)

        def get(self, key: str) -> bytes:
            return self._values.pop(key, None) or self._store.get(key, self._timeout)

    return Adapter


def _translate(error: Exception) -> Exception:
    """Gloo tells its errors apart by their text only."""
    if isinstance(error, HorovodInternalError):
        return error
    text = str(error)
    if "Timed out" in text or "timeout" in text:
        return CollectiveTimeoutError(f"a peer was silent for too long; look at it, or raise the timeout ({text})")
    if "/transport/" in text or "onnect" in text:
        return PeerLostError(f"the connection to a peer broke; form a new job without it ({text})")
    return EngineError(f"Gloo refused what it was asked to do; report this ({text})")
