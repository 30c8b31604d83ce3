"""Rows on their way from a task of Spark to its worker: files without a name, and a pipe that shows the task's end.

Each array of a batch has a file of its own, one row after the other. Rows for validation have files of their own, too.
Any range of rows is one piece of memory once it is mapped. An array of strings has two files: places of values, which
have one size in all rows, and the values. The files never had a name or lost it at once, so they vanish with the
processes, even if these are killed.

One more file is the log of the task's progress. The task appends a record each time it has written rows; a reader looks
at the last whole record. No record is ever taken out, so any number of threads and processes may read the same stream:
those that a worker forks, or that ``multiprocessing`` starts. Nothing goes through the pipe. Its end tells the readers
that the task has ended.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import select
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from executors import ExecutorError
from hvd_cluster.spark.rows.strings import PLACE, StringRows, Strings, encoded, without_rows
from hvd_cluster.spark.rows.torch_data_loader import received, sent

Array = npt.NDArray[Any]

VARIABLE = "HVD_CLUSTER_SPARK_ROWS"
"""The variable with the descriptors for the worker: of the pipe, of the log, and of the files of each part.

In a part, the file of each array comes first, then the file of the values of each array of strings.
"""

LONGEST_PAUSE_MS = 32
ALIGNMENT = 64
"""Bytes; TensorFlow requires this alignment of memory that it shares."""


@dataclass(frozen=True, slots=True)
class Form:
    """An array of a batch: its dtype, whether it has one dimension, and the type of its values if they are objects."""

    dtype: np.dtype[Any]
    flat: bool
    strings: Strings | None = None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """That of the file with one size for all rows."""
        return self.dtype if self.strings is None else PLACE

    def stored_width(self, width: int) -> int:
        """The number of elements of a row in that file, for ``width`` elements in the array."""
        return width if self.strings is None else width + 1


def _numbered(forms: Sequence[Form]) -> list[int | None]:
    """For each array the number of its file of values among all of them; None: it has none."""
    numbers = itertools.count()
    return [None if form.strings is None else next(numbers) for form in forms]


def _files_of(forms: Sequence[Form]) -> int:
    return len(forms) + sum(form.strings is not None for form in forms)


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """A record of the log: how many rows of each part are in the files, whether these are all, the arrays' widths."""

    rows: tuple[int, ...]
    complete: bool
    widths: tuple[int, ...]

    def pack(self) -> bytes:
        """As bytes; records of one stream have one length."""
        return struct.pack(_format(len(self.rows), len(self.widths)), *self.rows, self.complete, *self.widths)

    def has(self, split: int, rows: int | None) -> bool:
        """Whether all rows are in the files, or at least ``rows`` of the part."""
        return self.complete or (rows is not None and self.rows[split] >= rows)

    @classmethod
    def last(cls, log: int, splits: int, arrays: int) -> StreamProgress:
        """The last whole record of the file with the descriptor ``log``; before the first, a stream without rows."""
        layout = _format(splits, arrays)
        size = struct.calcsize(layout)
        records = os.fstat(log).st_size // size
        if records == 0:
            return cls((0,) * splits, False, (0,) * arrays)
        numbers = struct.unpack(layout, os.pread(log, size, (records - 1) * size))
        return cls(numbers[:splits], numbers[splits], numbers[splits + 1 :])


def _format(splits: int, arrays: int) -> str:
    return f"={splits}Q?{arrays}Q"


class RowWriter:
    """The task's end. ``descriptors`` and ``environment`` are for the worker; ``rows`` counts the rows of each part."""

    def __init__(
        self, folder: str, end: IO[bytes], log: IO[bytes], files: Sequence[Sequence[IO[bytes]]], forms: Sequence[Form]
    ) -> None:
        self._folder = folder
        self._log = log
        self._files = files
        self._value_files = _numbered(forms)
        self.rows = [0] * len(files)
        self._widths = (0,) * len(forms)
        self.descriptors = [file.fileno() for file in (end, log, *(file for split in files for file in split))]
        self.environment = {VARIABLE: " ".join(str(descriptor) for descriptor in self.descriptors)}

    def append(self, split: int, arrays: Sequence[Array]) -> None:
        """Add rows to a part; :meth:`announce` makes them known. Raises ExecutorError where the disk is full."""
        files = self._files[split]
        for file, number, array in zip(files[: len(arrays)], self._value_files, arrays, strict=True):
            stored = array if number is None else self._write_values(files[len(arrays) + number], array)
            self._write(file, stored.reshape(-1).view(np.uint8).data)
        self.rows[split] += len(arrays[0])
        self._widths = tuple(1 if array.ndim == 1 else array.shape[1] for array in arrays)

    def _write_values(self, file: IO[bytes], array: Array) -> Array:
        """The places of the values in ``file``."""
        places, values = encoded(array, file.tell())
        self._write(file, memoryview(values))
        return places

    def announce(self) -> None:
        """Tell the worker how many rows are in the files. Raises ExecutorError where the disk is full."""
        self._record(complete=False)

    def finish(self) -> None:
        """Tell the worker that these are all rows. Raises ExecutorError where the disk is full."""
        self._record(complete=True)

    def _record(self, complete: bool) -> None:
        self._write(self._log, memoryview(StreamProgress(tuple(self.rows), complete, self._widths).pack()))

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
def open_writer(folder: str, forms: Sequence[Form], splits: int) -> Iterator[RowWriter]:
    """A writer for ``splits`` parts of arrays of these ``forms``, with its files in ``folder``. Raises OSError."""
    count = _files_of(forms)
    with ExitStack() as stack:
        # The task keeps the writing end open until it ends, and writes nothing.
        end, _ = (stack.enter_context(open(*each, buffering=0)) for each in zip(os.pipe(), ("rb", "wb"), strict=True))
        log, *files = (
            stack.enter_context(tempfile.TemporaryFile(buffering=0, dir=folder)) for _ in range(1 + count * splits)
        )
        parts = [files[split * count : (split + 1) * count] for split in range(splits)]
        yield RowWriter(folder, end, log, parts, forms)


class RowReader:
    """The worker's end. Threads may share it; so may forked processes, and those that ``multiprocessing`` starts.

    ``descriptors`` are those of the variable; the caller closes them.
    """

    def __init__(self, descriptors: Sequence[int], splits: int, forms: Sequence[Form]) -> None:
        self._descriptors = descriptors
        self._end, self._log, *files = descriptors
        count = _files_of(forms)
        self._files = [files[split * count : (split + 1) * count] for split in range(splits)]
        self._value_files = _numbered(forms)
        self._forms = forms
        self._progress = StreamProgress((0,) * splits, False, (0,) * len(forms))
        self._widths = self._progress.widths  # of the first record that has them; they never change

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (sent(self._descriptors), len(self._files), self._forms)

    def wait(self, split: int, rows: int | None = None) -> int:
        """The number of rows that have arrived: all, or at least ``rows``.

        Raises ExecutorError if the task ended before that.
        """
        if self._progress.has(split, rows):
            return self._progress.rows[split]
        # Bound: the end of the task, which ends the pauses, too.
        for pause in _pauses():
            ended = self._has_ended(pause)
            progress = self._look()
            if progress.has(split, rows):
                return progress.rows[split]
            if ended:
                break
        raise ExecutorError(
            "the Spark task that sends the rows to this worker ended before the last row; see the error of the task, "
            "in the driver or in the log of the executor"
        )

    def _look(self) -> StreamProgress:
        progress = self._progress = StreamProgress.last(self._log, len(self._files), len(self._forms))
        if any(progress.widths):
            self._widths = progress.widths
        return progress

    def _has_ended(self, pause: int) -> bool:
        """Whether the task has ended; waits ``pause`` milliseconds for that."""
        # No lock and no reading: a reader that is killed or stopped here delays no other reader.
        end = select.poll()
        end.register(self._end, 0)
        return bool(end.poll(pause))

    @property
    def forms(self) -> Sequence[Form]:
        """The form of each array."""
        return self._forms

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of elements of a row in each array; zeros until the first row has arrived."""
        return self._widths

    def zeros(self, widths: Sequence[int], rows: int) -> list[Array]:
        """The arrays of ``rows`` rows of zeros, or of empty values, of these ``widths``."""
        shapes = (((rows,) if form.flat else (rows, width)) for form, width in zip(self._forms, widths, strict=True))
        return [
            np.zeros(shape, form.dtype) if form.strings is None else without_rows(form.strings, shape)
            for shape, form in zip(shapes, self._forms, strict=True)
        ]

    def row_bytes(self, split: int = 0, rows: int = 0) -> int:
        """The bytes of a row in all arrays; 0 until the first row has arrived.

        Strings count as the mean of the first ``rows`` of the part.
        """
        fixed = sum(self._itemsize(index) for index in range(len(self._forms)))
        numbers = [index for index, number in enumerate(self._value_files) if number is not None] if rows else []
        ends = (self._map(split, index, rows - 1, rows, mmap.ACCESS_READ)[0, -1] for index in numbers)
        return fixed + (sum(map(int, ends)) // rows if numbers else 0)

    def view(self, split: int, first: int, stop: int) -> list[Any]:
        """The rows from ``first`` to ``stop``, without a copy. Writing to them changes no other view, and no file.

        Arrays, or for strings a :class:`.strings.StringRows`.
        """
        arrays = (self._map(split, index, first, stop, mmap.ACCESS_COPY) for index in range(len(self._forms)))
        return [self._with_values(split, index, array) for index, array in enumerate(arrays)]

    def take(self, split: int, rows: npt.NDArray[np.int64]) -> list[Any]:
        """A copy of these ``rows``, in their order, as those of :meth:`view`; the values of strings are not copied."""
        stop = int(rows.max()) + 1
        arrays = [self._map(split, index, 0, stop, mmap.ACCESS_READ) for index in range(len(self._forms))]
        return [self._with_values(split, index, _take(array, rows)) for index, array in enumerate(arrays)]

    def _with_values(self, split: int, index: int, array: Array) -> Any:
        """``array`` itself or, if it has the places of strings, the strings."""
        form, number = self._forms[index], self._value_files[index]
        if form.strings is None or number is None:
            return array
        end = int(array[:, -1].max())
        # A file without a byte cannot be mapped.
        file = self._files[split][len(self._forms) + number]
        return StringRows(array, mmap.mmap(file, end, access=mmap.ACCESS_READ) if end else b"", form.strings, form.flat)

    def _map(self, split: int, index: int, first: int, stop: int, access: int) -> Array:
        """Mapped for as long as the array, or a view of it, lives."""
        form, size = self._forms[index], self._itemsize(index)
        offset = first * size % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._files[split][index],
            (stop - first) * size + offset,
            access=access,
            offset=first * size - offset,
        )
        array: Array = np.frombuffer(mapped, form.stored_dtype, offset=offset)
        is_flat = form.flat and form.strings is None
        return array if is_flat else array.reshape(-1, form.stored_width(self._widths[index]))

    def _itemsize(self, index: int) -> int:
        form, width = self._forms[index], self._widths[index]
        return form.stored_width(width) * form.stored_dtype.itemsize if width else 0


def _pauses() -> Iterator[int]:
    """Milliseconds: none before the first look, then longer ones each time."""
    pause = 0
    while True:
        yield pause
        pause = min(2 * pause or 1, LONGEST_PAUSE_MS)


def _received(descriptors: Sequence[Any], splits: int, forms: Sequence[Form]) -> RowReader:
    return RowReader(received(descriptors), splits, forms)


def _take(array: Array, rows: npt.NDArray[np.int64]) -> Array:
    shape = (len(rows), *array.shape[1:])
    size = int(np.prod(shape)) * array.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    out: Array = memory[first : first + size].view(array.dtype).reshape(shape)
    # This mode, because any other would copy the result once more.
    return np.take(array, rows, axis=0, out=out, mode="clip")


@contextmanager
def open_reader(forms: Sequence[Form], splits: int) -> Iterator[RowReader]:
    """The reader of the row stream that the environment names; open it once in a worker, because it takes the
    descriptors.

    Raises ExecutorError outside of a worker that gets rows.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        raise ExecutorError(f"only a worker of run_on_dataframe has rows: {VARIABLE} is not set in this process")
    descriptors = [int(descriptor) for descriptor in named.split()]
    with ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
            os.set_inheritable(descriptor, False)
        yield RowReader(descriptors, splits, forms)
