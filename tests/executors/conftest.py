"""What must hold after every test of the executors: nothing that it started is left."""

import os
import threading

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fails a test that leaves a process, a thread, a file descriptor or an environment variable."""
    before = _inventory()
    yield
    assert _inventory() == before


def _inventory():
    process = psutil.Process()
    return {
        "processes": process.children(recursive=True),
        "threads": threading.enumerate(),
        "descriptors": process.num_fds(),
        "environment": {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
    }
