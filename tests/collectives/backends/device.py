"""A device with memory that NumPy cannot reach. Each stream runs its calls in order; streams end in any order."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from collectives.api import DType
from collectives.backends.base import Backend
from collectives.backends.completion import Completion
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.backends.memory import Floats, HostMemory, Memory
from collectives.buffers import Buffer

__all__ = ["Device", "DeviceBackend", "Uploading"]

PATIENCE = 20.0


class Device:
    """The memory and the streams of one rank. Unless it ``notifies``, the ends of its operations must be polled."""

    def __init__(self, notifies: bool = True) -> None:
        self.notifies = notifies
        self._addresses = itertools.count(1 << 20, 1 << 32)
        self._blocks: dict[int, Bytes] = {}
        self.streams: dict[int, Stream] = {}

    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        address = next(self._addresses)
        self._blocks[address] = np.full(prod(shape) * dtype.itemsize, 0xA5, np.uint8)
        return Buffer(None, dtype, shape, self, "fake", address)

    def upload(self, array: Array, dtype: DType) -> Buffer:
        buffer = self.empty(dtype, array.shape)
        self.view(buffer)[:] = array.reshape(-1).view(dtype.storage)
        return buffer

    def download(self, buffer: Buffer) -> Array:
        return self.view(buffer).reshape(buffer.shape).copy()

    def view(self, buffer: Buffer) -> Array:
        """The memory, for the device itself: code under test has no way here."""
        block, offset = self._blocks[buffer.address >> 32 << 32 | 1 << 20], buffer.address - (1 << 20) & 0xFFFFFFFF
        return block[offset : offset + buffer.nbytes].view(buffer.dtype.storage)

    def on_host(self, buffer: Buffer) -> Buffer:
        return Buffer(self.view(buffer), buffer.dtype, buffer.shape)


class Stream:
    """Runs calls in their order, on a thread, while ``open`` is set."""

    def __init__(self, notifies: bool = True) -> None:
        self.notifies = notifies
        self.open = threading.Event()
        self.open.set()
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], End] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hvd-test-stream", daemon=True)
        self._thread.start()

    def enqueue(self, call: Callable[[], object]) -> End:
        end = End(self)
        self._calls.put((call, end))
        return end

    def close(self) -> None:
        self.open.set()
        self._calls.put(None)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            assert self.open.wait(PATIENCE)
            call, end = item
            end.run(call)


class End(Completion):
    """The end of one call on a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._over = threading.Event()
        self._lock = threading.Lock()  # owned by this end, held for a few instructions
        self._calls: list[Callable[[], None]] = []
        self._error: Exception | None = None
        self.value: object = None

    def run(self, call: Callable[[], object]) -> None:
        try:
            self.value = call()
        except Exception as error:  # noqa: BLE001
            self._error = error
        with self._lock:
            self._over.set()
        for over in self._calls:
            over()

    @property
    def is_done(self) -> bool:
        return self._over.is_set() and self._succeeded()

    def wait(self, timeout: float) -> bool:
        return self._over.wait(timeout) and self._succeeded()

    def precede(self, stream: int) -> None:
        raise NotImplementedError("no test needs it")

    def notify(self, call: Callable[[], None]) -> bool:
        if not self.stream.notifies:
            return False
        with self._lock:
            is_over = self._over.is_set()
            self._calls.append(call)
        if is_over:
            call()
        return True

    def _succeeded(self) -> bool:
        if self._error is not None:
            raise self._error
        return True


class DeviceMemory(Memory):
    """Computes with the host's kernels, later."""

    device = "fake"

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self._host = HostMemory()

    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        return self._device.empty(dtype, shape)

    def fill(self, target: Buffer, value: float) -> None:
        self._stream.enqueue(lambda: self._host.fill(self._device.on_host(target), value))

    def scale(self, source: Buffer, target: Buffer, factor: float) -> None:
        on_host = self._device.on_host
        self._stream.enqueue(lambda: self._host.scale(on_host(source), on_host(target), factor))

    def combine(self, target: Floats, first: Floats, second: Floats) -> None:
        self._stream.enqueue(lambda: self._host.combine(*map(self._floats, (target, first, second))))

    def products(self, first: Floats, second: Floats) -> tuple[float, float, float]:
        return self._result(lambda: self._host.products(self._floats(first), self._floats(second)))

    def store(self, numbers: Sequence[float]) -> Buffer:
        buffer = self.empty(DType.FLOAT64, (len(numbers),))
        self._stream.enqueue(lambda: np.copyto(self._device.view(buffer), numbers))
        return buffer

    def load(self, source: Buffer) -> list[float]:
        return self._result(lambda: self._device.view(source).tolist())

    def fence(self) -> Completion:
        return self._stream.enqueue(lambda: None)

    def _result(self, call: Callable[[], object]) -> object:
        end = self._stream.enqueue(call)
        assert end.wait(PATIENCE)
        return end.value

    def _floats(self, floats: Floats) -> Floats:
        return Floats(tuple(map(self._device.on_host, floats.planes)), floats.factor)


class DeviceBackend(Backend):
    """Runs the operations of ``inner``, a backend of the host, on a stream of ``device``; it owns both ends."""

    name = "fake"
    device = "fake"

    def __init__(self, inner: HostBackend, device: Device) -> None:
        super().__init__(inner.group)
        self._inner = inner
        self._device = device
        self.stream = device.streams[len(device.streams)] = Stream(device.notifies)
        self.memory = DeviceMemory(device, self.stream)

    def allreduce(self, sources, destinations, op, prescale=1.0, postscale=1.0):
        return self._later("allreduce", list(sources), list(destinations), op, prescale, postscale)

    def reducescatter(self, sources, destinations, counts, op, prescale=1.0, postscale=1.0):
        return self._later("reducescatter", list(sources), list(destinations), counts, op, prescale, postscale)

    def allgather(self, sources, destinations, counts):
        return self._later("allgather", list(sources), list(destinations), counts)

    def broadcast(self, source, destination, root):
        return self._later("broadcast", source, destination, root)

    def alltoall(self, source, destination, send_counts, receive_counts):
        return self._later("alltoall", source, destination, send_counts, receive_counts)

    def barrier(self):
        return self._later("barrier")

    def begin_after(self, ready):
        self.stream.enqueue(lambda: ready.wait(PATIENCE))

    def close(self):
        self.stream.close()
        self._inner.close()

    def abort(self, error):
        self._inner.abort(error)
        self.stream.open.set()

    def _later(self, operation: str, *arguments: object) -> Completion:
        return self.stream.enqueue(lambda: getattr(self._inner, operation)(*map(self._on_host, arguments)))

    def _on_host(self, argument: object) -> object:
        if isinstance(argument, list) and argument and isinstance(argument[0], Buffer):
            return [self._device.on_host(buffer) for buffer in argument]
        return self._device.on_host(argument) if isinstance(argument, Buffer) else argument


class Uploading(HostBackend):
    """Shows a backend of a device to tests that have arrays: uploads them, waits for the operation, downloads."""

    name = "uploading"

    def __init__(self, inner: DeviceBackend, device: Device) -> None:
        super().__init__(inner.group)
        self._inner = inner
        self._device = device

    def allreduce_arrays(self, sources, destinations, how):
        self._run(
            lambda ins, outs: self._inner.allreduce(ins, outs, how.op, how.prescale, how.postscale),
            sources,
            destinations,
            how.dtype,
        )

    def reducescatter_arrays(self, sources, destinations, counts, how):
        self._run(
            lambda ins, outs: self._inner.reducescatter(ins, outs, counts, how.op, how.prescale, how.postscale),
            sources,
            destinations,
            how.dtype,
        )

    def allgather_bytes(self, sources, destinations, counts):
        self._run(lambda ins, outs: self._inner.allgather(ins, outs, counts), sources, destinations, DType.UINT8)

    def broadcast_bytes(self, source, destination, root):
        self._run(lambda ins, outs: self._inner.broadcast(ins[0], outs[0], root), [source], [destination], DType.UINT8)

    def alltoall_bytes(self, source, destination, send_counts, receive_counts):
        self._run(
            lambda ins, outs: self._inner.alltoall(ins[0], outs[0], send_counts, receive_counts),
            [source],
            [destination],
            DType.UINT8,
        )

    def wait_for_all(self):
        assert self._inner.barrier().wait(PATIENCE)

    def close(self):
        self._inner.close()

    def abort(self, error):
        self._inner.abort(error)

    def _run(
        self,
        call: Callable[[list[Buffer], list[Buffer]], Completion],
        sources: Sequence[Array],
        destinations: Sequence[Array],
        dtype: DType,
    ) -> None:
        buffers: dict[tuple[int, int], Buffer] = {}
        for array in (*sources, *destinations):
            buffers.setdefault(_place(array), self._device.upload(array, dtype))
        ins, outs = ([buffers[_place(array)] for array in arrays] for arrays in (sources, destinations))
        assert call(ins, outs).wait(PATIENCE)
        for array, buffer in zip(destinations, outs, strict=True):
            array[:] = self._device.download(buffer)


def _place(array: Array) -> tuple[int, int]:
    """The same for arrays that are the same memory."""
    return array.__array_interface__["data"][0], array.nbytes
