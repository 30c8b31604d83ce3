"""The calls of NCCL that the backend needs, as an interface: Python has more than one binding of NCCL."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

from collectives.api import DType, HorovodInternalError, UnsupportedRequestError

if TYPE_CHECKING:
    from collectives.backends.nccl.device import Device

__all__ = [
    "CODES",
    "INSTALL_CUPY",
    "INSTALL_NCCL",
    "INSTALL_NVRTC",
    "OLDEST",
    "Combine",
    "Communicator",
    "Library",
    "Pause",
    "failure",
    "require_version",
    "version_text",
]

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
        """What went wrong in an operation that has begun; empty where nothing did. Never blocks."""

    @abstractmethod
    def abort(self) -> None:
        """End all operations, and release the communicator. It may take seconds."""

    @abstractmethod
    def destroy(self) -> None:
        """Release the communicator after its last operation. All members do so."""


class Library(ABC):
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
