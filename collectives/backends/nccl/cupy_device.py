"""A GPU by cupy: memory, a stream, events, and the kernels of :mod:`collectives.backends.nccl.sources`.

CUDA forbids that to all threads while one captures in the mode "global", which is torch's. The thread that looks for
failures asks about events at any time, so it asks in the mode "relaxed", as torch's own threads do.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from collectives.api import DType, HorovodInternalError, override
from collectives.backends.completion import Completion, Polled
from collectives.backends.memory import Floats
from collectives.backends.nccl.interface import BYTES, INSTALL_CUPY, INSTALL_NVRTC, Device, DTypeConversion, Placed
from collectives.backends.nccl.sources import PIECES, source
from collectives.buffers import Buffer

RELAXED = 2
"""A value of CUstreamCaptureMode."""


@contextmanager
def beside_captures() -> Iterator[None]:
    """In the block, the captures of other threads go on, whatever this thread calls."""
    mode = ctypes.c_int(RELAXED)
    _exchange(mode)
    try:
        yield
    finally:
        _exchange(mode)


def _exchange(mode: ctypes.c_int) -> None:
    """``mode`` becomes that of this thread, and has the one before. The GPU of this thread is set already."""
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@lru_cache(1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


THREADS = 256
"""Of one block."""
BLOCKS = 1024
SUMS = 64
"""The number of blocks that compute products: the host adds up three sums for each of their threads."""
SUCCESS, OLD_DRIVER, NO_DEVICE, NOT_READY = 0, 35, 100, 600
"""Values of cudaError_t."""
PIECE = np.dtype([("at", np.int64), ("memory", np.uint64), ("count", np.int64)], align=True)
TABLE = np.dtype([("piece", PIECE, (PIECES,))], align=True)
FLOATS = np.dtype([("upper", np.uint64), ("lower", np.uint64), ("factor", np.float64)], align=True)


def import_cupy() -> Any:
    """Cupy; ImportError with the remedy where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"the nccl backend needs cupy; install it with: {INSTALL_CUPY}") from error
    return cupy


def count_gpus() -> int:
    """The number of GPUs that this process sees; HorovodInternalError for a driver that does not work with cupy."""
    runtime = import_cupy().cuda.runtime
    with _errors_of("a look for GPUs"):
        try:
            count: int = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            if error.status == OLD_DRIVER:
                raise HorovodInternalError(_old_driver(runtime)) from error
            if error.status != NO_DEVICE:
                raise
            return 0
    return count


def _old_driver(runtime: Any) -> str:
    """CUDA gives a driver that is too old and one that is missing the same error; the latter has the version 0."""
    of_driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion() // 1000
    if not of_driver:
        return (
            f"the library of NVIDIA's driver, libcuda.so.1, is not there: install a driver for CUDA {needed}, or give "
            "the container its GPUs (docker run --gpus all)"
        )
    return (
        f"NVIDIA's driver is too old: it knows CUDA {_cuda_text(of_driver)}, and cupy needs CUDA {needed}; update the "
        f"driver, or take the cupy of an older CUDA: {INSTALL_CUPY}"
    )


def _cuda_text(version: int) -> str:
    """12090 -> "12.9"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def require_compiler() -> None:
    """HorovodInternalError where cupy does not find NVRTC, which compiles the kernels, and is no part of it."""
    nvrtc = import_cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:  # cupy has several kinds
        reason = " ".join(str(error).split())
        raise HorovodInternalError(f"cupy does not find NVRTC ({reason}); install it with: {INSTALL_NVRTC}") from error


def index_of(address: int) -> int:
    """The number of the GPU with the memory at ``address``."""
    with _errors_of("a look for the GPU of a tensor"):
        index: int = import_cupy().cuda.runtime.pointerGetAttributes(address).device
    return index


class CupyDevice(Device):
    """A :class:`Device`. ``index`` is the number of the GPU in this process."""

    def __init__(self, index: int) -> None:
        self._cupy = import_cupy()
        self._gpu = self._cupy.cuda.Device(index)
        self._kernel = lru_cache(maxsize=None)(self._compiled)
        count_gpus()  # which starts the driver
        with self._working(f"the start of GPU {index}"):
            # The driver takes the nearest priority that it has.
            self._queue = self._cupy.cuda.Stream(non_blocking=True, priority=-5)
        self.stream: int = self._queue.ptr

    @contextmanager
    @override
    def current(self) -> Iterator[None]:
        cuda = self._cupy.cuda
        if not cuda.driver.ctxGetCurrent():
            # A thread without a GPU keeps this one: to go back to GPU 0 would make a context, and take memory there.
            cuda.runtime.setDevice(self._gpu.id)
        # Not self._gpu, which is for one thread at a time.
        with cuda.Device(self._gpu.id), beside_captures():
            yield

    @override
    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Cupy's pool keeps the memory of each stream apart, and gives it out in its order."""
        with self._working("an allocation"), self._queue:
            memory = self._cupy.cuda.alloc(max(1, prod(shape) * dtype.itemsize))
        return Buffer(None, dtype, shape, memory, "cuda", memory.ptr)

    @override
    def fill(self, target: Buffer, value: float) -> None:
        target = target.cast(target.dtype.real)
        bits = int.from_bytes(_encoded(value, target.dtype), "little")
        self._over(target, "fill", target.pointer, target.count, np.uint64(bits))

    @override
    def scale(self, source: Buffer, target: Buffer, factor: float) -> None:
        real = source.dtype.real
        source, target = source.cast(real), target.cast(real)
        if source.pointer != target.pointer or factor != 1.0:
            self._over(target, "scale", source.pointer, target.pointer, target.count, np.float64(factor))

    @override
    def combine(self, target: Floats, first: Floats, second: Floats) -> None:
        upper, lower = _pointers(target)
        count = target.planes[0].count
        arguments = (upper, lower, _operand(first), _operand(second), count)
        self._launch(_dtype_of(target, first, second), "combine", (_blocks(count), 1), arguments)

    @override
    def products(self, first: Floats, second: Floats) -> tuple[float, float, float]:
        sums = self.empty(DType.FLOAT64, (3 * SUMS * THREADS,))
        arguments = (sums.pointer, _operand(first), _operand(second), first.planes[0].count)
        self._launch(_dtype_of(first, second), "products", (SUMS, 1), arguments)
        crossed, ones, others = np.array(self.load(sums)).reshape(-1, 3).sum(axis=0).tolist()
        return crossed * first.factor * second.factor, ones * first.factor**2, others * second.factor**2

    @override
    def store(self, numbers: Sequence[float]) -> Buffer:
        buffer, array = self.empty(DType.FLOAT64, (len(numbers),)), np.array(numbers, np.float64)
        with self._working("an upload"):
            buffer.owner.copy_from_host_async(array.ctypes.data, array.nbytes, self._queue)
        return buffer  # pageable memory has been read when the call returns

    @override
    def load(self, source: Buffer) -> list[float]:
        array = np.empty(source.count, np.float64)
        with self._working("a download"):
            runtime = self._cupy.cuda.runtime
            runtime.memcpyAsync(
                array.ctypes.data, source.pointer, array.nbytes, runtime.memcpyDeviceToHost, self.stream
            )
            self._queue.synchronize()
        numbers: list[float] = array.tolist()
        return numbers

    @override
    def fence(self) -> Completion:
        with self._working("a record of an event"):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._queue)
        return CupyEvent(event, self)

    @override
    def pack(
        self, pieces: Sequence[Placed], target: Buffer, conversion: DTypeConversion = BYTES, factor: float = 1.0
    ) -> None:
        self._launch_tables("pack", pieces, target.pointer, conversion, factor)

    @override
    def unpack(
        self, source: Buffer, pieces: Sequence[Placed], conversion: DTypeConversion = BYTES, factor: float = 1.0
    ) -> None:
        self._launch_tables("unpack", pieces, source.pointer, conversion, factor)

    @override
    def pinned(self, nbytes: int) -> Buffer:
        """Cupy's pool keeps the memory for later."""
        with self._working("an allocation of pinned memory"):
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, nbytes))
        return Buffer(np.frombuffer(memory, np.uint8, nbytes), DType.UINT8, (nbytes,), memory)

    @override
    def download_to(self, source: Buffer, target: Buffer) -> None:
        self._copy(source, target, self._cupy.cuda.runtime.memcpyDeviceToHost)

    @override
    def upload_from(self, source: Buffer, target: Buffer) -> None:
        self._copy(source, target, self._cupy.cuda.runtime.memcpyHostToDevice)

    # Launches.

    def _copy(self, source: Buffer, target: Buffer, kind: int) -> None:
        with self._working("a copy between GPU and host"):
            runtime = self._cupy.cuda.runtime
            runtime.memcpyAsync(target.pointer, source.pointer, source.nbytes, kind, self.stream)

    def _launch_tables(
        self, name: str, pieces: Sequence[Placed], room: int, conversion: DTypeConversion, factor: float
    ) -> None:
        for start in range(0, len(pieces), PIECES):
            some = pieces[start : start + PIECES]
            longest = max([piece.buffer.count for piece in some])
            self._launch(conversion, name, (_blocks(longest), len(some)), (_table(some), room, np.float64(factor)))

    def _over(self, buffer: Buffer, name: str, *arguments: Any) -> None:
        if buffer.count:
            self._launch(_plain(buffer.dtype), name, (_blocks(buffer.count), 1), arguments)

    def _launch(self, conversion: DTypeConversion, name: str, grid: tuple[int, int], arguments: Sequence[Any]) -> None:
        with self._working(f"the kernel {name}"):
            self._kernel(conversion, name)(grid, (THREADS,), tuple(arguments), stream=self._queue)

    def _compiled(self, conversion: DTypeConversion, name: str) -> Any:
        """Raises HorovodInternalError, whatever cupy raises: its compiler may be missing, or too old for the GPU."""
        try:
            module = self._cupy.RawModule(code=source(conversion), options=("--std=c++17",))
            return module.get_function(name).kernel
        except Exception as error:
            raise HorovodInternalError(
                f"cupy cannot compile a kernel, which needs NVRTC of cupy's CUDA ({error}); install it with: "
                f"{INSTALL_NVRTC}"
            ) from error

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        with _errors_of(what), self.current():
            yield


class CupyEvent(Polled):
    """An event that was recorded on the stream of ``device``."""

    def __init__(self, event: Any, device: CupyDevice) -> None:
        self._event = event
        self._device = device

    @property
    @override
    def is_done(self) -> bool:
        runtime = import_cupy().cuda.runtime
        with _errors_of("an operation on the GPU"), self._device.current():
            status: int = runtime.eventQuery(self._event.ptr)  # cupy's Event.done takes an error for "not yet"
            if status not in (SUCCESS, NOT_READY):
                runtime.check_status(status)
        return status == SUCCESS

    @override
    def precede(self, stream: int) -> None:
        runtime = import_cupy().cuda.runtime
        with _errors_of("a wait of a stream"), self._device.current():  # stream 0 is that of the current GPU
            runtime.streamWaitEvent(stream, self._event.ptr, 0)


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    cuda = import_cupy().cuda
    try:
        yield
    except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.memory.OutOfMemoryError) as error:
        raise HorovodInternalError(f"{what} failed: {error}") from error


def _blocks(count: int) -> int:
    return max(1, min(BLOCKS, -(-count // (4 * THREADS))))


@lru_cache(64)
def _plain(dtype: DType) -> DTypeConversion:
    return DTypeConversion(dtype, dtype)


def _table(pieces: Sequence[Placed]) -> Any:
    """The argument of a kernel, by value."""
    table = np.zeros((), TABLE)
    rows = [(at, buffer.pointer, buffer.count) for at, buffer in pieces]
    table["piece"][: len(rows)] = np.array(rows, PIECE)
    return table


def _pointers(floats: Floats) -> tuple[int, int]:
    upper, *lower = floats.planes
    return upper.pointer, lower[0].pointer if lower else 0


def _operand(floats: Floats) -> Any:
    return np.array((*_pointers(floats), floats.factor), FLOATS)


def _dtype_of(*operands: Floats) -> DTypeConversion:
    """By the type of the operands that have one plane; two planes are the halves of float32."""
    single = [floats.planes[0].dtype for floats in operands if len(floats.planes) == 1]
    return _plain(single[0] if single else DType.FLOAT32)


def _encoded(value: float, dtype: DType) -> bytes:
    if dtype is DType.BFLOAT16:
        return bytes(np.array(np.float32(value).view(np.uint32) >> 16, np.uint16).tobytes())
    return bytes(np.array(value, dtype.storage).tobytes())


# Owned by this module, held while a device is made, which does not wait for other ranks.
_lock = threading.Lock()
_devices: dict[int, CupyDevice] = {}


def shared_device(index: int) -> CupyDevice:
    """The one device object of this process for GPU ``index``: all process sets share its stream.

    Two communicators whose operations run at the same time on one GPU may wait for one another.
    """
    with _lock:
        if index not in _devices:
            _devices[index] = CupyDevice(index)
        return _devices[index]
