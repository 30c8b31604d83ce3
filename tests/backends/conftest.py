"""Whatever a test of a backend opens, it must close."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread or a file descriptor. Both may take a moment to end."""
    resource_tracker.ensure_running()  # Lives as long as this process, once the first process was spawned.
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (set(threading.enumerate()) - threads or _descriptors() - descriptors):
        gc.collect()
        time.sleep(0.02)
    assert not set(threading.enumerate()) - threads
    assert not _descriptors() - descriptors


def _descriptors() -> set[str]:
    """Descriptors with what they are, less those of the directory listing itself."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return {each for each in found if "/proc/" not in each}
