"""Whether this host has a GPU that this process can use, and which one the process works on."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from collectives.api import HorovodInternalError
from collectives.backends.nccl.interface import INSTALL_CUPY, Device


class GpuPlace:
    """``index`` is the number of the GPU that a binding has chosen; None where none has.

    Written by threads that submit tensors, read by the thread that runs operations.
    """

    def __init__(self) -> None:
        self.index: int | None = None

    def default(self, local_rank: int, count: int) -> int:
        """The GPU of a rank without a tensor, on a host with ``count`` of them."""
        return local_rank % count if self.index is None else self.index


place = GpuPlace()


DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl")
"""The files of NVIDIA's driver on Linux, on Windows' Linux, and on a Jetson."""

NO_DRIVER = (
    "this host has no NVIDIA GPU, or its driver is not visible here (no {}); give the container its GPUs (docker run "
    "--gpus all), or move the tensors to the CPU on all ranks: each HOROVOD_GPU_OPERATIONS needs a GPU"
)


@lru_cache(1)
def without_gpu() -> str:
    """Why this process cannot use a GPU, with the remedy; empty if it can. It is quick on a host without one."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return NO_DRIVER.format(DRIVERS[0])
    if find_spec("cupy") is None:
        return f"cupy is missing; install it with: {INSTALL_CUPY}"
    try:
        found = _count_gpus()
        if found:
            _require_compiler()
    except HorovodInternalError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a job on CPUs starts beside a cupy that is broken, too
        reason = error.__cause__ or error
        return f"cupy does not work here ({reason}); install it again with: {INSTALL_CUPY}"
    return "" if found else "no GPU is visible; look at CUDA_VISIBLE_DEVICES and at the output of nvidia-smi"


def device_at(address: int, local_rank: int) -> Device:
    """The GPU with the tensor at ``address``; with 0, that of the rank with this ``local_rank``.

    Raises HorovodInternalError.
    """
    from collectives.backends.nccl.cupy_device import index_of, shared_device

    return shared_device(index_of(address) if address else place.default(local_rank, _count_gpus()))


def _count_gpus() -> int:
    """The number of GPUs that are visible; HorovodInternalError for a driver that is too old."""
    from collectives.backends.nccl.cupy_device import count_gpus

    return count_gpus()


def _require_compiler() -> None:
    """HorovodInternalError where there is none for kernels."""
    from collectives.backends.nccl.cupy_device import require_compiler

    require_compiler()
