"""The NCCL backend on a GPU that is the memory of the host."""

from __future__ import annotations

import pytest

from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.watcher import Watcher
from tests.backends.device import Uploading
from tests.backends.matrix import run_matrix
from tests.backends.members import group_of, in_threads
from tests.backends.nccl.fake import FakeDevice, FakeNetwork, connector


def with_backends(size, body, timeout=20.0):
    """``body(backend, device)`` on a thread of each member; what they return."""

    def member(rank):
        device, group = FakeDevice(rank), group_of(size, rank)
        backend = NcclBackend(group, connector(network, b"id", group, device), Watcher(), timeout)
        try:
            return body(backend, device)
        finally:
            backend.close()
            device.close()

    network = FakeNetwork()
    return in_threads(size, member)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_matrix(size):
    with_backends(
        size, lambda backend, device: run_matrix(Uploading(backend, device), backend.group.position, size, size + 1)
    )
