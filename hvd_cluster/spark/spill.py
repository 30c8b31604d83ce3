"""Rows on their way from a task of Spark to its worker: files without a name, and a pipe that tells how far they are.

Each array of a batch has a file of its own, one row after the other; where rows are kept apart for validation, these
have files of their own, too. So any range of rows is one piece of memory, once it is mapped. The files never had a name
or have lost it at once: nothing is left, however the processes end.

The pipe takes messages of one size: how many rows are in the files, whether more will come, and the widths of the
arrays, which only the first row tells. The latest message says all, so the task leaves out what does not fit the pipe
and never waits for the worker.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from executors.api import ExecutorError

__all__ = ["ALIGNMENT", "VARIABLE", "Form", "SpillReader", "SpillWriter", "open_reader", "open_writer"]

Array = npt.NDArray[Any]

VARIABLE = "HVD_CLUSTER_SPARK_ROWS"
"""The variable with the descriptors for the worker: of the pipe, and of the files of each part."""

POLL_SECONDS = 0.1
MESSAGES_AT_ONCE = 1024
ALIGNMENT = 64
"""Bytes; what TensorFlow asks of memory that it shares."""


@dataclass(frozen=True, slots=True)
class Form:
    """An array of a batch: its dtype, and whether it has one dimension."""

    dtype: np.dtype[Any]
    flat: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """What the task says: the rows of each part that are in the files, whether these are all, the arrays' widths."""

    rows: tuple[int, ...]
    complete: bool
    widths: tuple[int, ...]

    def pack(self) -> bytes:
        """As bytes, whose number follows from those of parts and arrays."""
        return struct.pack(_format(len(self.rows), len(self.widths)), *self.rows, self.complete, *self.widths)

    @classmethod
    def unpack(cls, data: bytes, parts: int, arrays: int) -> Progress:
        """The last one that ``data`` ends with."""
        size = struct.calcsize(_format(parts, arrays))
        numbers = struct.unpack(_format(parts, arrays), data[-size:])
        return cls(numbers[:parts], numbers[parts], numbers[parts + 1 :])


def _format(parts: int, arrays: int) -> str:
    return f"={parts}Q?{arrays}Q"


class SpillWriter:
    """The task's end. ``descriptors`` and ``environment`` are for the worker."""

    def __init__(self, folder: str, pipe: tuple[IO[bytes], IO[bytes]], files: Sequence[Sequence[IO[bytes]]]) -> None:
        self._folder = folder
        self._pipe = pipe[1]
        self._files = files
        self._rows = [0] * len(files)
        self._widths = (0,) * len(files[0])
        self.descriptors = [pipe[0].fileno(), *(file.fileno() for part in files for file in part)]
        self.environment = {VARIABLE: " ".join(str(descriptor) for descriptor in self.descriptors)}
        os.set_blocking(self._pipe.fileno(), False)

    def append(self, part: int, arrays: Sequence[Array]) -> None:
        """Add rows to a part; :meth:`announce` tells of them. Raises ExecutorError where the disk is full."""
        for file, array in zip(self._files[part], arrays, strict=True):
            self._write(file, array.reshape(-1).view(np.uint8).data)
        self._rows[part] += len(arrays[0])
        self._widths = tuple(1 if array.ndim == 1 else array.shape[1] for array in arrays)

    def announce(self) -> None:
        """Tell the worker how far the rows are, unless the pipe is full."""
        self._tell(complete=False)

    def finish(self, stopped: Callable[[], bool]) -> None:
        """Tell the worker that these are all rows; wait for room in the pipe, unless ``stopped()``."""
        ready = select.poll()
        ready.register(self._pipe, select.POLLOUT)
        # Ends when the worker reads or, after POLL_SECONDS at most, when it is said to have ended.
        while not self._tell(complete=True) and not stopped():
            ready.poll(POLL_SECONDS * 1000)

    def _tell(self, complete: bool) -> bool:
        message = Progress(tuple(self._rows), complete, self._widths).pack()
        return self._pipe.write(message) is not None  # as a whole, or not at all: pipes do so up to PIPE_BUF bytes

    def _write(self, file: IO[bytes], data: memoryview) -> None:
        try:
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self._folder).free
            raise ExecutorError(
                f"the rows of a worker do not fit {self._folder}, which has {free / 2**20:.0f} MiB left; "
                "set spark.local.dir to a folder with more space, or use more workers, each of which takes fewer rows"
            ) from error


@contextmanager
def open_writer(folder: str, arrays: int, parts: int) -> Iterator[SpillWriter]:
    """A writer for ``parts`` parts of ``arrays`` arrays, with its files in ``folder``. Raises OSError."""
    with ExitStack() as stack:
        reader, writer = (
            stack.enter_context(open(end, mode, buffering=0)) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        files = [
            [stack.enter_context(tempfile.TemporaryFile(buffering=0, dir=folder)) for _ in range(arrays)]
            for _ in range(parts)
        ]
        yield SpillWriter(folder, (reader, writer), files)


class SpillReader:
    """The worker's end. Threads may share it."""

    def __init__(self, pipe: IO[bytes], files: Sequence[Sequence[IO[bytes]]], forms: Sequence[Form]) -> None:
        self._pipe = pipe
        self._files = files
        self._forms = forms
        self._progress = Progress((0,) * len(files), False, (0,) * len(forms))
        # Held for one message, which has no limit of its own: the end of the task ends the wait.
        self._lock = threading.Lock()

    def wait(self, part: int, rows: int | None = None) -> int:
        """The number of rows that have come: all, or at least ``rows``.

        Raises ExecutorError when the task has ended before.
        """
        while not self._has(part, rows):
            with self._lock:
                if not self._has(part, rows):
                    self._hear()
        return self._progress.rows[part]

    def row_bytes(self) -> int:
        """The bytes of a row in all arrays, once a row has come; until then 0."""
        return sum(self._itemsize(index) for index in range(len(self._forms)))

    def view(self, part: int, first: int, stop: int) -> list[Array]:
        """The rows from ``first`` to ``stop``, without a copy. Writing to them changes no other view, and no file."""
        return [self._map(part, index, first, stop, mmap.ACCESS_COPY) for index in range(len(self._forms))]

    def take(self, part: int, rows: npt.NDArray[np.int64]) -> list[Array]:
        """A copy of these ``rows``, in their order."""
        stop = int(rows.max()) + 1
        arrays = [self._map(part, index, 0, stop, mmap.ACCESS_READ) for index in range(len(self._forms))]
        return [_take(array, rows) for array in arrays]

    def _map(self, part: int, index: int, first: int, stop: int, access: int) -> Array:
        """Mapped for as long as the array, or a view of it, lives."""
        form, size = self._forms[index], self._itemsize(index)
        offset = first * size % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._files[part][index].fileno(),
            (stop - first) * size + offset,
            access=access,
            offset=first * size - offset,
        )
        array: Array = np.frombuffer(mapped, form.dtype, offset=offset)
        return array if form.flat else array.reshape(-1, self._progress.widths[index])

    def _itemsize(self, index: int) -> int:
        return self._progress.widths[index] * self._forms[index].dtype.itemsize

    def _has(self, part: int, rows: int | None) -> bool:
        progress = self._progress
        return progress.complete or (rows is not None and progress.rows[part] >= rows)

    def _hear(self) -> None:
        size = len(self._progress.pack())
        # Messages are written as a whole, so that none is ever cut here.
        data = self._pipe.read(size * MESSAGES_AT_ONCE)
        if not data:
            raise ExecutorError(
                "the task of Spark that brings this worker its rows ended before the last of them had come; "
                "its own error, in the driver or in the log of the executor, says why"
            )
        self._progress = Progress.unpack(data, len(self._files), len(self._forms))


def _take(array: Array, rows: npt.NDArray[np.int64]) -> Array:
    shape = (len(rows), *array.shape[1:])
    size = int(np.prod(shape)) * array.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    out: Array = memory[first : first + size].view(array.dtype).reshape(shape)
    # The mode, because any other would copy the result once more.
    return np.take(array, rows, axis=0, out=out, mode="clip")


@contextmanager
def open_reader(forms: Sequence[Form], parts: int) -> Iterator[SpillReader]:
    """The reader of the spill that the environment names; to be opened once in a worker, as it takes the descriptors.

    Raises ExecutorError where this is no worker that gets rows.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        raise ExecutorError(f"this process is no worker that gets rows: it has no variable {VARIABLE}")
    with ExitStack() as stack:
        descriptors = [int(descriptor) for descriptor in named.split()]
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        pipe, *files = (stack.enter_context(open(descriptor, "rb", buffering=0)) for descriptor in descriptors)
        count = len(forms)
        yield SpillReader(pipe, [files[part * count : (part + 1) * count] for part in range(parts)], forms)
