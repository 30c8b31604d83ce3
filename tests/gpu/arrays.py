"""Arrays of the host on a real GPU, for tests that know arrays."""

from __future__ import annotations

import numpy as np

from collectives.api import DType
from collectives.backends.host import Array
from collectives.backends.nccl.cupy_device import CupyDevice, import_cupy
from collectives.buffers import Buffer

__all__ = ["Arrays"]


class Arrays:
    """Uploads to ``device`` and downloads; both wait for the GPU."""

    def __init__(self, device: CupyDevice) -> None:
        self.device = device
        self._runtime = import_cupy().cuda.runtime

    def upload(self, array: Array, dtype: DType) -> Buffer:
        buffer = self.device.empty(dtype, array.shape)
        array = np.ascontiguousarray(array)
        with self.device.current():
            self._runtime.deviceSynchronize()
            if array.nbytes:
                self._runtime.memcpy(buffer.pointer, array.ctypes.data, array.nbytes, 1)
        return buffer

    def download(self, buffer: Buffer) -> Array:
        array = np.empty(buffer.shape, buffer.dtype.storage)
        with self.device.current():
            self._runtime.deviceSynchronize()
            if array.nbytes:
                self._runtime.memcpy(array.ctypes.data, buffer.pointer, array.nbytes, 2)
        return array
