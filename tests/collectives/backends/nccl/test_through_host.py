"""Tensors on a GPU that travel by a backend for host memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from collectives.api import DType, HorovodInternalError, ReduceOp, ShutDownError
from collectives.backends.nccl import through_host
from collectives.backends.nccl.through_host import ThroughHostBackend
from tests.collectives.backends.device import Uploading
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.matrix import run_matrix, shorten
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.nccl.fake import FakeDevice
from tests.collectives.backends.nccl.streams import PATIENCE, LateStream


def with_backends(size, body):
    """``body(backend, device)`` on a thread of each member; what they return."""

    def member(rank):
        device = FakeDevice(rank)
        backend = ThroughHostBackend(InprocBackend(group_of(size, rank), shared), lambda address: device)
        try:
            return body(backend, device)
        finally:
            backend.close()
            device.close()

    shared = InprocGroup(size)
    return in_threads(size, member)


@pytest.mark.parametrize("size", [1, 2])
def test_matrix(size, monkeypatch):
    shorten(monkeypatch)
    monkeypatch.setattr(through_host, "PIECE", 1 << 16)
    with_backends(size, lambda backend, device: run_matrix(Uploading(backend, device), backend.group.position, size))


def test_the_next_piece_is_copied_before_the_host_combines():
    def body(backend, device):
        tensor = device.upload(np.ones(5 * through_host.PIECE // 2, np.uint8), DType.UINT8)
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        assert device.download(tensor).min() == 2
        return [name for name in device.launches if "load" in name]

    assert with_backends(2, body) == [["download", "download", "upload", "download", "upload", "upload"]] * 2


def test_memory_in_use_is_waited_for():
    def body(backend, device):
        user = LateStream()
        tensor = device.upload(np.zeros(2), DType.FLOAT64)
        backend.begin_after(user.enqueue(lambda: device.upload_into(tensor, 3.0)))
        end = backend.allreduce([tensor], [tensor], ReduceOp.SUM)
        assert end.wait(PATIENCE)
        user.close()
        return device.download(tensor).tolist()

    assert with_backends(2, body) == [[6.0, 6.0]] * 2


def test_an_abort_ends_the_wait_for_a_gpu_that_hangs():
    error, device = HorovodInternalError("told to stop"), FakeDevice()
    backend = ThroughHostBackend(InprocBackend(group_of(1), InprocGroup(1)), lambda address: device)
    tensor = device.upload(np.zeros(2), DType.FLOAT64)
    device.queue.hold()
    aborter = threading.Timer(0.1, backend.abort, [error])
    aborter.start()
    with pytest.raises(HorovodInternalError) as caught:
        backend.allreduce([tensor], [tensor], ReduceOp.SUM)
    assert caught.value is error
    aborter.join(PATIENCE)
    device.queue.release()
    backend.close()
    device.close()


def test_the_engine_works_while_the_gpu_is_busy():
    """Its kernels may take long, and may wait for other ranks."""

    def body(backend, device):
        def attend():
            waits.append(1)
            if len(waits) == 3:
                device.queue.release()

        waits = []
        backend.attend(attend)
        tensor = device.upload(np.ones(2), DType.FLOAT64)
        device.queue.hold()
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        return len(waits) >= 3

    assert with_backends(1, body) == [True]


def test_a_closed_backend_says_so():
    def body(backend, device):
        backend.close()
        with pytest.raises(ShutDownError):
            backend.barrier()

    with_backends(1, body)
