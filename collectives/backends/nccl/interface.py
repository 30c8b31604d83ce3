"""The interfaces of a GPU and of a binding of NCCL, and the steps of a reduction on NCCL."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from collectives.api import DType, HorovodInternalError, ReduceOp, UnsupportedRequestError
from collectives.backends.completion import Completion
from collectives.backends.memory import Memory
from collectives.buffers import Buffer
from collectives.kernels.reduction import reduction

OLDEST = 21800
"""NCCL 2.18 has configurations of communicators, and bfloat16."""
INSTALL_CUPY = "pip install 'hvd-cluster[nccl]', or 'hvd-cluster[nccl13]' for CUDA 13"
INSTALL_NCCL = "pip install --upgrade nvidia-nccl-cu12, or nvidia-nccl-cu13 for CUDA 13"
INSTALL_NVRTC = "pip install --upgrade nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13"

CODES: Mapping[DType, int] = {
    DType.INT8: 0,
    DType.UINT8: 1,
    DType.INT32: 2,
    DType.INT64: 4,
    DType.FLOAT16: 6,
    DType.FLOAT32: 7,
    DType.FLOAT64: 8,
    DType.BFLOAT16: 9,
}
"""The values of ncclDataType_t. It has no 16-bit integer and no bool."""

Pause: TypeAlias = Callable[[], None]
"""Sleeps for a moment, and raises to end the wait that calls it."""

SHARED = (
    "two ranks may have the same GPU: call torch.cuda.set_device(hvd.local_rank()) before the first tensor; ranks that "
    "shall share a GPU need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1"
)
_MEANINGS = {
    1: "a call of CUDA failed; NCCL_DEBUG=WARN tells which one",
    2: "a system call failed; NCCL_DEBUG=WARN tells which one, often there is too little shared memory in /dev/shm",
    3: "an internal error of NCCL; NCCL_DEBUG=WARN tells more",
    4: "an argument is not valid; report this as a bug",
    5: SHARED,
    6: "a rank or the network failed; look at the output of the other ranks",
    7: "cupy waits for NCCL's calls: leave NCCL_COMM_BLOCKING out, or install nccl4py",
}
"""The values of ncclResult_t, and what to do."""


class Combine(enum.IntEnum):
    """The values of ncclRedOp_t."""

    SUM = 0
    PRODUCT = 1
    MAX = 2
    MIN = 3
    AVERAGE = 4


class Communicator(ABC):
    """One member's end of a communicator.

    Memory is given by addresses, and counted in elements of ``dtype``, one of :data:`CODES`. ``stream`` is the handle
    of the stream on which the call is enqueued. Calls do not wait for the other members, and raise
    HorovodInternalError. They come from one thread at a time, but for :meth:`error` and :meth:`abort`.
    """

    @abstractmethod
    def allreduce(self, source: int, target: int, count: int, dtype: DType, op: Combine, stream: int) -> None:
        """Combine ``count`` elements of each member. Source and target may be the same."""

    @abstractmethod
    def reducescatter(self, source: int, target: int, count: int, dtype: DType, op: Combine, stream: int) -> None:
        """Combine size * ``count`` elements, and keep the ``count`` of this member.

        The target may be its own part of the source.
        """

    @abstractmethod
    def allgather(self, source: int, target: int, count: int, dtype: DType, stream: int) -> None:
        """Join ``count`` elements of each member. The source may be its own part of the target."""

    @abstractmethod
    def broadcast(self, source: int, target: int, count: int, dtype: DType, root: int, stream: int) -> None:
        """Copy the source of ``root`` to the targets of all. Source and target may be the same."""

    @abstractmethod
    def send(self, source: int, count: int, dtype: DType, peer: int, stream: int) -> None:
        """Send to the member at position ``peer``, which receives; only inside a group."""

    @abstractmethod
    def receive(self, target: int, count: int, dtype: DType, peer: int, stream: int) -> None:
        """Receive from the member at position ``peer``, which sends; only inside a group."""

    @abstractmethod
    def error(self) -> str:
        """The error of an operation that has begun; empty if there is none. Never blocks."""

    @abstractmethod
    def abort(self) -> None:
        """End all operations, and release the communicator. It may take seconds."""

    @abstractmethod
    def destroy(self) -> None:
        """Release the communicator after its last operation. All members do so."""


class NcclLibrary(ABC):
    """A binding of NCCL. ``version`` is such as 22105, for 2.21.5."""

    name: str
    version: int

    @abstractmethod
    def unique_id(self) -> bytes:
        """A new id, by which the members of a communicator find one another. Needs no GPU."""

    @abstractmethod
    def connect(self, id: bytes, size: int, position: int, device: Device, pause: Pause) -> Communicator:
        """The communicator of the ``size`` members with ``id``. Waits for all of them, and calls ``pause`` again and
        again.

        Raises what ``pause`` raises, and HorovodInternalError.
        """

    @abstractmethod
    def group(self) -> AbstractContextManager[None]:
        """The calls in the block begin together, at its end. Aborts in it happen together, too."""


def version_text(version: int) -> str:
    """22105 -> "2.21.5"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def require_version(version: int) -> None:
    """Raise UnsupportedRequestError for a library that is too old."""
    if version < OLDEST:
        raise UnsupportedRequestError(
            f"NCCL {version_text(version)} is too old: {version_text(OLDEST)} or newer is needed; install it with: "
            f"{INSTALL_NCCL}"
        )


def failure(call: str, code: int, text: str) -> HorovodInternalError:
    """The error for the result ``code`` of a ``call``, for which NCCL has the ``text``."""
    meaning = _MEANINGS.get(code, "NCCL_DEBUG=WARN tells more")
    return HorovodInternalError(f"NCCL's {call} failed with {text}: {meaning}")


KEPT = 1 << 8
_COMBINES = {
    ReduceOp.SUM: Combine.SUM,
    ReduceOp.AVERAGE: Combine.SUM,
    ReduceOp.PRODUCT: Combine.PRODUCT,
    ReduceOp.MIN: Combine.MIN,
    ReduceOp.MAX: Combine.MAX,
}
_LOGIC = {
    ReduceOp.SUM: Combine.MAX,
    ReduceOp.MAX: Combine.MAX,
    ReduceOp.PRODUCT: Combine.MIN,
    ReduceOp.MIN: Combine.MIN,
}
_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)


@dataclass(frozen=True, slots=True)
class DTypeConversion:
    """Numbers of ``dtype`` travel as numbers of ``carrier``.

    With ``key``, MIN or MAX, floats travel as integers of the same order. A NaN is then the lowest or the highest one,
    because NCCL drops NaN. -0 is below 0. Numbers that come back are divided by ``divisor`` and truncated towards zero.
    """

    dtype: DType
    carrier: DType
    key: ReduceOp | None = None
    divisor: int = 1

    @property
    def is_copy(self) -> bool:
        """Whether the bytes stay the same, on both ways."""
        return self.divisor == 1 and (self.carrier is self.dtype or self.dtype is DType.BOOL)


BYTES = DTypeConversion(DType.UINT8, DType.UINT8)
"""For data that is only moved."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Scale by ``before``, convert, let NCCL ``combine``, convert back, scale by ``after``."""

    conversion: DTypeConversion
    combine: Combine
    before: float
    after: float

    @property
    def is_native(self) -> bool:
        """Whether NCCL can work on the memory of the tensors."""
        return self.conversion.is_copy


@lru_cache(KEPT)
def recipe(dtype: DType, op: ReduceOp, prescale: float, postscale: float, size: int) -> Recipe:
    """How ``size`` members compute postscale * op(prescale * tensor).

    Raises EngineError and InvalidRequestError for what no backend computes.
    """
    reduction(dtype, op, prescale, postscale)  # which refuses it
    if dtype is DType.BOOL:
        return Recipe(DTypeConversion(dtype, DType.UINT8), _LOGIC[op], 1.0, 1.0)
    if op is ReduceOp.SUM and postscale == 1.0 / size and _averages(dtype, size):
        return Recipe(DTypeConversion(dtype, dtype), Combine.AVERAGE, prescale, 1.0)
    return Recipe(_conversion(dtype, op, size), _COMBINES[op], prescale, postscale)


def _averages(dtype: DType, size: int) -> bool:
    """Whether NCCL's average is as exact as a sum that is scaled.

    NCCL multiplies each input by 1 / size in the type of the tensor. With 16 bits, this is exact for powers of two.
    """
    return dtype in (DType.FLOAT32, DType.FLOAT64) or (not dtype.is_integer and size & (size - 1) == 0)


def _conversion(dtype: DType, op: ReduceOp, size: int) -> DTypeConversion:
    if op is ReduceOp.AVERAGE:  # of integers only
        return DTypeConversion(dtype, DType.INT64, divisor=size)
    if op in _EXTREMES and not dtype.is_integer:
        return DTypeConversion(dtype, DType.INT64 if dtype is DType.FLOAT64 else DType.INT32, op)
    return DTypeConversion(dtype, DType.INT32 if dtype is DType.INT16 else dtype)


class Placed(NamedTuple):
    """``buffer`` is next to others in packed memory, from element ``at`` on."""

    at: int
    buffer: Buffer


class Device(Memory):
    """One GPU, and a ``stream`` of high priority on it, in whose order all calls take effect. No call waits.

    ``stream`` is the handle, a ``cudaStream_t``.
    """

    device = "cuda"
    stream: int

    @abstractmethod
    def current(self) -> AbstractContextManager[object]:
        """In the block, this is the GPU of the calling thread. Calls of NCCL need it; those of this class do not.

        No call in the block disturbs the capture of a CUDA graph by another thread.
        """

    @abstractmethod
    def pack(
        self, pieces: Sequence[Placed], target: Buffer, conversion: DTypeConversion = BYTES, factor: float = 1.0
    ) -> None:
        """Write ``factor`` times the numbers of all ``pieces`` to ``target``, converted, with one kernel."""

    @abstractmethod
    def unpack(
        self, source: Buffer, pieces: Sequence[Placed], conversion: DTypeConversion = BYTES, factor: float = 1.0
    ) -> None:
        """The reverse of :meth:`pack`: read ``source``, convert, divide, scale, and write all ``pieces``."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Buffer:
        """New bytes on the host that the GPU can copy while the host goes on; to be held until it has."""

    @abstractmethod
    def download_to(self, source: Buffer, target: Buffer) -> None:
        """Copy ``source`` to ``target``, memory of :meth:`pinned`."""

    @abstractmethod
    def upload_from(self, source: Buffer, target: Buffer) -> None:
        """Copy ``source``, memory of :meth:`pinned`, to ``target``."""

    def begin_after(self, ready: Completion) -> None:
        """Let all later calls take effect after ``ready``."""
        ready.precede(self.stream)


class NcclConnection(NamedTuple):
    """A communicator, the library that it belongs to, and the GPU on which it works."""

    library: NcclLibrary
    device: Device
    communicator: Communicator


Connect: TypeAlias = Callable[[int, Pause], NcclConnection]
"""Connects the members of a group; the argument is the address of a tensor on the GPU to use, or 0. See
:meth:`NcclLibrary.connect` for the other one and for the errors."""
