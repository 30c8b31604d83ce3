"""Fake GPUs that the real bootstraps find."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from collectives.backends.nccl import bootstrap, presence, through_host
from tests.collectives.backends.nccl.fake import FakeDevice, FakeLibrary, FakeNetwork

__all__ = ["gpu_of_each_thread"]


def gpu_of_each_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], FakeDevice]:
    """Each thread is a rank with a GPU; returns what gives it to the thread that calls."""
    of_thread, network = threading.local(), FakeNetwork()

    def library() -> FakeLibrary:
        if not hasattr(of_thread, "library"):
            of_thread.library, of_thread.device = FakeLibrary(network), FakeDevice()
        return of_thread.library

    def device(address: int, local_rank: int) -> FakeDevice:
        library()
        return of_thread.device

    monkeypatch.setattr(bootstrap, "load", library)
    monkeypatch.setattr(bootstrap, "unavailable", lambda: "")
    monkeypatch.setattr(through_host, "without_gpu", lambda: "")
    for module in (bootstrap, presence, through_host):
        monkeypatch.setattr(module, "device_at", device)
    return device
