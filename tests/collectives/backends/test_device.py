"""Backends of a device: the engine's side of them never touches the memory, and does not wait where it need not."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from collectives.api import DType, InvalidRequestError, ReduceOp
from collectives.backends.adasum import adasum
from collectives.backends.completion import DONE, all_of
from collectives.buffers import Buffer
from tests.collectives.backends.device import Device, DeviceBackend, Uploading
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.matrix import encode, run_matrix, shorten
from tests.collectives.backends.members import group_of, in_threads

SIZE = 4
FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


def with_devices(size, body):
    """``body(backend, device)`` on a thread of each member; what they return."""

    def member(rank):
        device = Device()
        backend = DeviceBackend(InprocBackend(group_of(size, rank), shared), device)
        try:
            return body(backend, device)
        finally:
            backend.close()

    shared = InprocGroup(size)
    return in_threads(size, member)


@pytest.mark.parametrize("size", [1, 3])
def test_matrix(size, monkeypatch):
    shorten(monkeypatch)
    with_devices(size, lambda backend, device: run_matrix(Uploading(backend, device), backend.group.position, size))


def test_device_memory_is_out_of_reach():
    buffer = Device().upload(np.arange(5.0), DType.FLOAT64)
    with pytest.raises(InvalidRequestError, match="the tensor is on fake"):
        _ = buffer.host
    assert buffer.part(1, 3).pointer == buffer.pointer + 8
    assert buffer.cast(DType.UINT8).count == 40


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("in_place", [False, True])
def test_adasum_computes_the_same_bits_as_on_the_host(dtype, in_place, monkeypatch):
    monkeypatch.setattr("collectives.backends.adasum.PIECE", 64)
    lengths = (5, 0, 301)
    tensors = [
        [encode(np.random.default_rng([rank, length]).normal(size=length), dtype) for length in lengths]
        for rank in range(SIZE)
    ]

    def on_device(backend, device):
        sources = [device.upload(each, dtype) for each in tensors[backend.group.position]]
        results = sources if in_place else [device.empty(dtype, (length,)) for length in lengths]
        assert adasum(backend, sources, results, 0.5, 3.0).wait(20)
        return [device.download(result) for result in results]

    def on_host(rank):
        buffers = [Buffer(each.copy(), dtype, each.shape) for each in tensors[rank]]
        adasum(InprocBackend(group_of(SIZE, rank), shared), buffers, buffers, 0.5, 3.0)
        return [buffer.host for buffer in buffers]

    shared = InprocGroup(SIZE)
    found, expected = with_devices(SIZE, on_device), in_threads(SIZE, on_host)
    for of_found, of_expected in zip(found, expected, strict=True):
        for one, other in zip(of_found, of_expected, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_adasum_of_one_member_scales():
    def body(backend, device):
        tensor = device.upload(np.arange(3.0), DType.FLOAT64)
        assert adasum(backend, [tensor], [tensor], 2.0, 3.0).wait(20)
        return device.download(tensor).tolist()

    assert with_devices(1, body) == [[0.0, 6.0, 12.0]]


def test_streams_end_in_any_order():
    def body(backend, device):
        other = DeviceBackend(InprocBackend(group_of(1), InprocGroup(1)), device)
        first, second = (device.upload(np.ones(3), DType.FLOAT64) for _ in range(2))
        backend.stream.open.clear()
        late = backend.allreduce([first], [first], ReduceOp.SUM, 5.0)
        early = other.allreduce([second], [second], ReduceOp.SUM, 7.0)
        both = all_of([late, DONE, early])
        assert early.wait(20)
        assert (late.is_done, both.is_done, device.download(first).max()) == (False, False, 1.0)
        backend.stream.open.set()
        assert both.wait(20)
        assert both.is_done
        other.close()
        return device.download(first).max(), device.download(second).max()

    assert with_devices(1, body) == [(5.0, 7.0)]


def test_the_end_of_several_operations_is_notified():
    def body(backend, device):
        heard = threading.Semaphore(0)
        tensor = device.upload(np.ones(3), DType.FLOAT64)
        backend.stream.open.clear()
        both = all_of([backend.allreduce([tensor], [tensor], ReduceOp.SUM) for _ in range(2)])
        assert both.notify(heard.release)
        assert not heard.acquire(blocking=False)
        backend.stream.open.set()
        assert heard.acquire(timeout=20)
        assert heard.acquire(timeout=20)
        assert both.is_done
        assert DONE.notify(heard.release)
        return heard.acquire(blocking=False)

    assert with_devices(1, body) == [True]


def test_a_device_that_does_not_notify_says_so():
    device = Device(notifies=False)
    backend = DeviceBackend(InprocBackend(group_of(1), InprocGroup(1)), device)
    assert not all_of([backend.barrier(), backend.barrier()]).notify(lambda: None)
    backend.close()


def test_what_is_over_costs_nothing_to_wait_for():
    assert all_of([DONE, DONE]) is DONE
    assert all_of([]) is DONE
    assert (DONE.is_done, DONE.wait(0.0)) == (True, True)
    DONE.precede(0)


def test_close_ends_the_stream():
    with_devices(2, lambda backend, device: backend.barrier())
    assert "hvd-test-stream" not in {thread.name for thread in threading.enumerate()}
