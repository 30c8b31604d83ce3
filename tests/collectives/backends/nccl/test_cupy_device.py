"""What cupy is asked for an event, and on which GPU. Cupy itself is a record of its calls here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from collectives.api import DType, HorovodInternalError
from collectives.backends.nccl import cupy_device
from collectives.backends.nccl.cupy_device import NO_DEVICE, NOT_READY, CupyDevice, CupyEvent, count_gpus
from collectives.buffers import Buffer

ILLEGAL_ADDRESS = 700
GLOBAL = 0


class CudaError(Exception):
    """Any of cupy's."""

    def __init__(self, text, status=0):
        super().__init__(text)
        self.status = status


class Runtime:
    """``cupy.cuda.runtime``, and ``cupy.cuda.driver``: the GPU of one thread. ``status`` is that of each event.

    ``mode`` is the thread's mode of capture, and ``modes`` has those in which events were looked at.
    """

    CUDARuntimeError = CUDADriverError = OutOfMemoryError = CudaError

    def __init__(self):
        self.status, self.gpu, self.context = 0, 0, 0
        self.waits, self.set = [], []
        self.lack = None
        self.driver_version = 12090
        self.mode, self.modes = GLOBAL, []

    def getDeviceCount(self):
        if self.lack is not None:
            raise self.lack
        return 2

    def driverGetVersion(self):
        return self.driver_version

    def runtimeGetVersion(self):
        return 12090

    def ctxGetCurrent(self):
        return self.context

    def setDevice(self, index):
        self.gpu, self.context = index, index + 1
        self.set.append(index)

    def eventQuery(self, event):
        self.modes.append(self.mode)
        return self.status

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode._obj.value = mode._obj.value, self.mode

    def streamWaitEvent(self, stream, event, flags):
        self.waits.append((self.gpu, stream, event))

    def check_status(self, status):
        raise CudaError(f"status {status}")


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()

    class Gpu:
        def __init__(self, id):
            self.id = id

        def __enter__(self):
            self.before = made.gpu
            made.setDevice(self.id)

        def __exit__(self, *_):
            made.setDevice(self.before)

    def stream(non_blocking, priority):
        return SimpleNamespace(ptr=7)

    cuda = SimpleNamespace(runtime=made, driver=made, memory=made, Device=Gpu, Stream=stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cupy_device, "_driver", lambda: made)
    return made


def test_cuda_that_sees_no_gpu_has_none(runtime):
    """With an empty CUDA_VISIBLE_DEVICES it raises an error, which is none of the driver."""
    assert count_gpus() == 2
    runtime.lack = CudaError("no CUDA-capable device is detected", NO_DEVICE)
    assert count_gpus() == 0


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        (11080, r"driver is too old: it knows CUDA 11\.8, and cupy needs CUDA 12; update the driver, or"),
        (0, r"libcuda\.so\.1, is not there: install a driver for CUDA 12, or give the container its GPUs"),
    ],
)
def test_a_driver_that_is_too_old_or_missing(runtime, driver, text):
    """The error of CUDA is the same for both."""
    runtime.lack = CudaError("CUDA driver version is insufficient for CUDA runtime version", 35)
    runtime.driver_version = driver
    with pytest.raises(HorovodInternalError, match=text):
        count_gpus()


def test_a_look_for_gpus_that_fails_otherwise(runtime):
    runtime.lack = CudaError("system not yet initialized", 802)
    with pytest.raises(HorovodInternalError, match=r"a look for GPUs failed.*not yet initialized"):
        count_gpus()


def event_on(index):
    return CupyEvent(SimpleNamespace(ptr=5), CupyDevice(index))


def test_an_error_of_the_gpu_ends_an_operation(runtime):
    """Cupy's own ``Event.done`` would be False for ever."""
    event = event_on(0)
    assert event.is_done
    runtime.status = NOT_READY
    assert not event.is_done
    runtime.status = ILLEGAL_ADDRESS
    with pytest.raises(HorovodInternalError, match="an operation on the GPU failed: status 700"):
        event.wait(1.0)


def test_the_default_stream_is_that_of_the_right_gpu(runtime):
    """Its handle is 0 on each GPU, and the caller may be on another one."""
    event = event_on(1)
    runtime.setDevice(0)
    event.precede(0)
    assert runtime.waits == [(1, 0, 5)]
    assert runtime.gpu == 0


def test_a_thread_that_has_used_no_gpu_keeps_that_of_its_rank(runtime):
    assert event_on(1).is_done
    assert set(runtime.set) == {1}


def test_a_look_at_an_event_does_not_end_the_capture_of_a_graph_by_another_thread(runtime):
    event = event_on(0)
    assert event.is_done
    runtime.status = ILLEGAL_ADDRESS
    with pytest.raises(HorovodInternalError):
        event.wait(1.0)
    assert runtime.modes == [cupy_device.RELAXED] * 2
    assert runtime.mode == GLOBAL


def test_a_kernel_that_cannot_be_compiled(runtime, monkeypatch):
    """Its compiler may be older than the GPU."""

    def module(code, options):
        raise ValueError("invalid value for --gpu-architecture")

    monkeypatch.setattr(sys.modules["cupy"], "RawModule", module, raising=False)
    with pytest.raises(HorovodInternalError, match=r"cannot compile.*gpu-architecture\); install it with: pip install"):
        CupyDevice(0).fill(Buffer(None, DType.FLOAT32, (3,), None, "cuda", 1 << 20), 1.0)
