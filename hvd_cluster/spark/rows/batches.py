"""The rows of one rank, in batches."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_cluster.spark.rows.order import Indices, Window, growing, mixed, own_batches
from hvd_cluster.spark.rows.row_stream import ALIGNMENT, Form, RowReader
from hvd_cluster.spark.rows.strings import objects
from hvd_cluster.spark.rows.torch_data_loader import EpochLog, LoaderWorker, RowBatch, current_worker, introduce

Windows = Callable[[], Iterator[Sequence[Any]]]
Pack = Callable[[Sequence[Any]], Any]


def dataset(
    windows: Windows, forms: Sequence[Form], widths: Sequence[int], batch_size: int, pack: Pack, batches: int
) -> Any:
    """A dataset of so many ``batches``; ``pack`` makes one of its tensors, which have the order of ``forms``.

    Each call of ``windows`` is an epoch of arrays, of ``batch_size`` rows or a multiple; only the last may have fewer.
    TensorFlow takes their memory as it is, and cuts them without Python. It gets strings a batch at a time, because
    it copies them. ``widths`` are zero if there are no rows.
    """
    import tensorflow as tf

    specs = tuple(
        tf.TensorSpec([None] if form.flat else [None, width or None], tf.as_dtype(form.dtype))
        for form, width in zip(forms, widths, strict=True)
    )

    has_strings = any(form.strings is not None for form in forms)

    def arrays() -> Iterator[tuple[Any, ...]]:
        found = cut_windows(windows(), batch_size) if has_strings else windows()
        return (tuple(map(np.ascontiguousarray, each)) for each in found)

    def cut(*arrays: Any) -> Any:
        firsts = tf.data.Dataset.range(0, tf.shape(arrays[0], tf.int64)[0], batch_size)
        return firsts.map(lambda first: pack([array[first : first + batch_size] for array in arrays]))

    found = tf.data.Dataset.from_generator(arrays, output_signature=specs).flat_map(cut)
    return found.apply(tf.data.experimental.assert_cardinality(batches)).with_options(_without_autotuning(tf))


def cut_windows(windows: Iterator[Sequence[Any]], size: int) -> Iterator[Sequence[Any]]:
    """The rows of each of the ``windows``, ``size`` at a time, as NumPy arrays."""
    return (arrays for window in windows for arrays in zip(*(_cut_numpy(each, size) for each in window), strict=True))


def _without_autotuning(tf: Any) -> Any:
    """With tuning, the end of an iterator waits for a thread that may sleep as long as the iterator has lived."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


Array = npt.NDArray[Any]
Cut: TypeAlias = Callable[[Array, int], Iterator[Any]]

BATCHES_AT_ONCE = 1024
DIGEST_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the rows of a shard; a random order follows from ``seed``, ``rank`` and the number of the epoch."""

    batch_size: int
    shuffle: bool
    seed: int
    rank: int


@dataclass(frozen=True)
class Source:
    """One part of the rows of a row stream, and how its arrays make a batch.

    ``arrays`` is the number of arrays on each side: features, labels and, if any, weights.
    ``nested`` says for each side whether its arrays are in a tuple.
    """

    stream: RowReader
    split: int
    arrays: tuple[int, ...]
    nested: tuple[bool, ...]

    def wait(self, rows: int | None = None) -> int:
        return self.stream.wait(self.split, rows)

    def window(self, batch_size: int, rows: int) -> Window:
        """The window for rows as large as the first ``rows`` are, or all of the same size."""
        return Window.of(self.stream.row_bytes(self.split, rows), batch_size)

    def digest(self, rows: int) -> int:
        """A checksum of the first ``rows`` in their order."""
        value = 0
        for first in range(0, rows, DIGEST_ROWS):
            for array in self.stream.view(self.split, first, min(first + DIGEST_ROWS, rows)):
                for part in array.parts() if array.dtype == object else [array.reshape(-1).view(np.uint8).data]:
                    value = zlib.crc32(part, value)
        return value


class Shard:
    """The rows of this rank, in batches ``(features, labels)``; each ``for`` loop over it is an epoch.

    ::

        for features, labels in shard:  # NumPy arrays
            ...

    Every batch has ``batch_size`` rows; the last one has the rest. ``features`` and ``labels`` are arrays of shape
    (rows,) or (rows, columns), or tuples of such; see ``run_on_dataframe``. Strings and binary data are arrays of
    objects, ``str`` or ``bytes``; torch has no such tensors, so :meth:`torch` gives lists of the same shape. With a
    ``sample_weight_col`` a batch is ``(features, labels, weights)``, the weights of shape (rows,). :meth:`torch` and
    :meth:`tensorflow` give the same as tensors, :meth:`tf_data` as a dataset of TensorFlow. The caller owns a batch:
    later epochs do not see changes to it.

    The first epoch begins while Spark still produces rows, and takes them in the order of their arrival; it raises
    ExecutorError if Spark fails. Later epochs read the rows from the local disk or, usually, from the system's cache of
    it. The second epoch waits until all rows have arrived, also if the loop of the first one was left early.

    With ``shuffle``, every epoch has its own order, which depends on ``seed``, rank and number of the epoch, and on the
    order in which Spark gave the rows. Rows are mixed in windows of 16 MiB, or one batch where that is more: in the
    first epoch with their neighbours, in later ones with chunks of 1 MiB from anywhere. To begin early, the first epoch
    has a first window of 8 batches, and doubles the windows up to that size. Memory holds two windows at most, and the
    windows of batches that the caller keeps. The size of strings counts by its mean, and memory has those of a batch.

    ``DataLoader(shard, num_workers=2)`` gives the same batches in the same order, as tensors. Its workers, forked or
    spawned, share the batches of an epoch. ``batch_size`` of ``run_on_dataframe`` says how many rows a batch has; leave
    ``batch_size`` of ``DataLoader`` out, because any value but 1 or None raises ValueError. A shard can be pickled only
    for a process that is being started; otherwise pickling raises TypeError.

    Shards may differ in their numbers of rows, and may have none. A rank that has run out of rows calls ``hvd.join()``.
    """

    def __init__(self, source: Source, order: Order, epochs: EpochLog, validation: Shard | None) -> None:
        self._source = source
        self._order = order
        self._epochs = epochs
        self._validation = validation
        self._cut: Cut = _cut_numpy

    @property  # type: ignore[misc]
    def __class__(self) -> type[Shard]:
        # DataLoader calls isinstance(), which reads this attribute first. So the class becomes a dataset of torch in
        # time, also where torch is imported later than this module.
        introduce(Shard)
        return Shard

    @property
    def validation(self) -> Shard | None:
        """The rows that are kept apart for validation, never shuffled; None if there is no ``validation`` argument."""
        return self._validation

    @property
    def rows(self) -> int:
        """The number of rows. Waits until the last one has arrived."""
        return self._source.wait()

    def __len__(self) -> int:
        """The number of batches of an epoch. Waits until the last row has arrived."""
        return -(-self.rows // self._order.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """The batches of the next epoch."""
        introduce(Shard)
        # All of it in C, because there may be millions of small batches.
        return itertools.chain.from_iterable(map(self._batches_of, self._epoch()))

    def torch(self) -> Shard:
        """The same epochs as tensors of torch, which share the memory of the arrays."""
        return self._as(_cut_torch)

    def tensorflow(self) -> Shard:
        """The same epochs as tensors of TensorFlow, which share the memory of the arrays where alignment allows it."""
        return self._as(_cut_tensorflow)

    def tf_data(self) -> Any:
        """The same epochs as a ``tf.data.Dataset``, for ``model.fit`` and graphs; an iteration of it is an epoch.

        Waits for the last row, because Keras must know the number of batches. Tensors have the dtypes of the arrays and
        the shapes (None,) or (None, columns). The option ``autotune.enabled`` of the dataset is off.
        """
        source, batches = self._source, len(self)
        widths = source.stream.widths if batches else (0,) * sum(source.arrays)
        return dataset(self._epoch, source.stream.forms, widths, self._order.batch_size, self._packed, batches)

    # For workers that come and go: the same batches in any process that has the same rows in the same order.

    @property
    def batch_size(self) -> int:
        """The number of rows of each batch but the last."""
        return self._order.batch_size

    def widths(self) -> tuple[int, ...]:
        """The number of elements of a row in each array; zeros if there are no rows. Waits for the last one."""
        return self._source.stream.widths if self.rows else ()

    def feature_widths(self) -> tuple[int, ...]:
        """Those of the features alone; nothing if there are no rows."""
        return self.widths()[: self._source.arrays[0]]

    def digest(self) -> int:
        """A checksum of all rows in their order. Waits for the last one."""
        return self._source.digest(self.rows)

    def rest(self, epoch: int, first: int) -> Iterator[tuple[Any, ...]]:
        """The batches of ``epoch`` from number ``first`` on. Waits for the last row."""
        return itertools.chain.from_iterable(map(self._batches_of, self._rest(epoch, first)))

    def filler(self, widths: Sequence[int], strings: Sequence[Array] = ()) -> tuple[Any, ...]:
        """A batch of the first rows, or of zeros of these ``widths`` if there are no rows.

        It is a whole one, because batch norm needs more than one row. ``strings`` are those of :meth:`first_strings` of
        another rank, which stand in each row instead of empty ones.
        """
        source, size = self._source, self.batch_size
        rows, given = min(self.rows, size), iter(strings)
        if rows:
            return next(self._batches_of(source.stream.view(source.split, 0, rows)))
        empty = source.stream.zeros(widths, size)
        arrays = (np.repeat(next(given, each[:1]), size, axis=0) if each.dtype == object else each for each in empty)
        return next(self._batches_of(list(arrays)))

    @property
    def has_strings(self) -> bool:
        """Whether a batch has strings or binary data."""
        return any(form.strings is not None for form in self._source.stream.forms)

    def first_strings(self) -> list[Array]:
        """Those of the first row: an array of objects for each array of them. There must be a row."""
        arrays = self._source.stream.view(self._source.split, 0, 1)
        return [objects(array) for array in arrays if array.dtype == object]

    def _rest(self, epoch: int, first: int) -> Iterator[list[Array]]:
        source, order = self._source, self._order
        rows, begin = source.wait(), first * order.batch_size
        if rows == 0:
            return
        window = source.window(order.batch_size, rows)
        if not order.shuffle:
            for start in range(begin, rows, window.rows):
                yield source.stream.view(source.split, start, min(start + window.rows, rows))
            return
        windows = mixed(np.random.default_rng([order.seed, order.rank, epoch]), rows, window)
        for number, indices in enumerate(windows):
            left = indices[max(0, begin - number * window.rows) :]
            if len(left):
                yield source.stream.take(source.split, left)

    def batched(self, size: int) -> Shard:
        """The same rows in batches of ``size``; counts the epochs together with this one."""
        shard = copy.copy(self)
        shard._order = replace(self._order, batch_size=size)
        return shard

    def _as(self, cut: Cut) -> Shard:
        # A copy, which counts the epochs together with this one.
        shard = copy.copy(self)
        shard._cut = cut
        if self._validation is not None:  # bool() would ask for its length, and wait for all rows
            shard._validation = self._validation._as(cut)
        return shard

    def _batches_of(self, arrays: list[Array]) -> Iterator[tuple[Any, ...]]:
        cuts = (self._cut(array, self._order.batch_size) for array in arrays)
        counts, nested = self._source.arrays, self._source.nested
        sides = [
            _side(list(itertools.islice(cuts, count)), tupled) for count, tupled in zip(counts, nested, strict=True)
        ]
        return map(RowBatch, zip(*sides, strict=True))

    def _packed(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        counts, left = self._source.arrays, iter(arrays)
        sides = [tuple(itertools.islice(left, count)) for count in counts]
        return tuple(side if tupled else side[0] for side, tupled in zip(sides, self._source.nested, strict=True))

    def _epoch(self) -> Iterator[list[Array]]:
        worker = current_worker()
        return self._windows(self._epochs.begin(worker) if self._order.shuffle else 0, worker)

    def _windows(self, epoch: int, worker: LoaderWorker) -> Iterator[list[Array]]:
        """The rows of an epoch that this worker reads, some batches at a time."""
        source, order = self._source, self._order
        if source.wait(1) == 0:
            return
        if not order.shuffle:
            yield from self._in_order(source.window(order.batch_size, 0), worker)
            return
        generator = np.random.default_rng([order.seed, order.rank, epoch])
        rows = self._all_mixed(generator) if epoch else self._as_they_come(generator)
        for indices in own_batches(rows, order.batch_size, worker.number, worker.count):
            yield source.stream.take(source.split, indices)

    def _in_order(self, window: Window, worker: LoaderWorker) -> Iterator[list[Array]]:
        source, size = self._source, self._order.batch_size
        first, others = worker.number * size, (worker.count - 1) * size
        most = size if others else window.rows
        while (count := min(source.wait(first + size) - first, most)) > 0:
            count -= count % size if count > size else 0
            yield source.stream.view(source.split, first, first + count)
            first += count + others

    def _all_mixed(self, generator: np.random.Generator) -> Iterator[Indices]:
        rows = self._source.wait()
        return mixed(generator, rows, self._source.window(self._order.batch_size, rows))

    def _as_they_come(self, generator: np.random.Generator) -> Iterator[Indices]:
        source, batch_size, first = self._source, self._order.batch_size, 0
        # By the size of the rows before the window, because the order must not depend on when rows have arrived.
        for size in growing(lambda rows: source.window(batch_size, rows).rows, batch_size):
            count = min(source.wait(first + size) - first, size)
            if count == 0:
                return
            yield first + generator.permutation(count)
            first += count
            if count < size:  # the last rows
                return


def _side(cuts: Sequence[Iterator[Any]], nested: bool) -> Iterator[Any]:
    return zip(*cuts, strict=True) if nested else cuts[0]


def _cut_numpy(array: Any, size: int) -> Iterator[Array]:
    if array.dtype == object:
        return (objects(array[first : first + size]) for first in range(0, len(array), size))
    return (array[first : first + size] for first in range(0, len(array), size))


def _cut_torch(array: Array, size: int) -> Iterator[Any]:
    import torch

    if array.dtype == object:
        return (batch.tolist() for batch in _cut_numpy(array, size))
    # split() makes views at a fraction of what slices cost; in pieces, as there may be millions of batches of one row.
    pieces = torch.split(torch.from_numpy(array), size * BATCHES_AT_ONCE)
    return itertools.chain.from_iterable(torch.split(piece, size) for piece in pieces)


def _cut_tensorflow(array: Array, size: int) -> Iterator[Any]:
    import tensorflow

    # TensorFlow crashes on memory of another alignment.
    if array.dtype == object or array.ctypes.data % ALIGNMENT or array[:size].nbytes % ALIGNMENT:
        return map(tensorflow.convert_to_tensor, _cut_numpy(array, size))
    from_dlpack = tensorflow.experimental.dlpack.from_dlpack
    return (from_dlpack(batch.__dlpack__()) for batch in _cut_numpy(array, size))
