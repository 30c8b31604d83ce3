"""Record batches of Spark -> arrays in the layout for training."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hvd_cluster.spark.rows.columns import STRINGS, Column, ColumnKind, Selection, Stack

Array = npt.NDArray[Any]

DENSE = 1
SHOWN_COLUMNS = 8
LONGEST_VALUE = 60


class Converter:
    """Converts the batches of one partition, in their order: all rows must have vectors and arrays of one size.

    The batches have the columns ``selection.names`` in this order, under any name. ``widths`` has the numbers of
    elements in columns of arrays and vectors, by name, after the first row.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._positions = {name: position for position, name in enumerate(selection.names)}
        self.widths: dict[str, int] = {}
        self._batch: Any = None

    def arrays(self, batch: pa.RecordBatch) -> list[Array]:
        """One array for each stack of the selection, of shape (rows,) where it is flat, or else (rows, width).

        Strings and binary data are arrays of objects, ``str`` or ``bytes``. Raises ValueError for nulls, for vectors
        and arrays of another size than that of the first row, and for strings that are not UTF-8.
        """
        self._batch = batch
        return [self._stack(stack, batch) for stack in self._selection.stacks]

    def is_validation(self, column: Column, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Which rows the ``column`` selects for validation. Raises ValueError for nulls."""
        self._batch = batch
        return self._column(column, batch) > 0

    def _stack(self, stack: Stack, batch: pa.RecordBatch) -> Array:
        arrays = [self._column(column, batch) for column in stack.columns]
        if len(arrays) == 1:
            array = np.ascontiguousarray(arrays[0])
            return array if stack.flat else array.reshape(batch.num_rows, -1)
        widths = [1 if array.ndim == 1 else array.shape[1] for array in arrays]
        out = np.empty((batch.num_rows, sum(widths)), stack.dtype)
        first = 0
        for array, width in zip(arrays, widths, strict=True):
            out[:, first : first + width] = array.reshape(-1, width)
            first += width
        return out

    def _column(self, column: Column, batch: pa.RecordBatch) -> Array:
        values = batch.column(self._positions[column.name])
        self._refuse_nulls(column.name, values, "")
        if column.kind is ColumnKind.SCALAR:
            return _numbers(values)
        if column.kind in STRINGS:
            return self._strings(column.name, values)
        return (
            self._array(column.name, values) if column.kind is ColumnKind.ARRAY else self._vector(column.name, values)
        )

    def _strings(self, name: str, values: pa.Array) -> Array:
        """Objects. Strings of Spark may have bytes that are no UTF-8, which raises ValueError."""
        try:
            return _numbers(values)
        except (UnicodeDecodeError, pa.ArrowException) as error:
            first = next((index for index, each in enumerate(values) if not _is_utf8(each)), 0)
            raise ValueError(
                f"column {name!r} has a string that is not UTF-8, first in the row {self._row(first)}; use the column "
                "as binary data, as with cast('binary'), or repair it, as with make_valid_utf8()"
            ) from error

    def _array(self, name: str, values: pa.ListArray) -> Array:
        offsets = values.offsets.to_numpy()
        size = self._check_sizes(name, np.diff(offsets))
        elements = values.values.slice(offsets[0], offsets[-1] - offsets[0])
        self._refuse_nulls(name, elements, " inside of its arrays", size)
        return _numbers(elements).reshape(-1, size)

    def _vector(self, name: str, values: pa.StructArray) -> Array:
        """Vectors arrive as structs of type, size, indices and values; dense ones have no size and no indices."""
        elements = values.field("values")
        lengths = np.diff(elements.offsets.to_numpy())
        dense = values.field("type").to_numpy() == DENSE
        size = self._check_sizes(name, np.where(dense, lengths, values.field("size").fill_null(0).to_numpy()))
        numbers = _numbers(elements.flatten())
        if dense.all():
            return numbers.reshape(-1, size)
        out = np.zeros((len(values), size))
        is_dense = np.repeat(dense, lengths)
        out[dense] = numbers[is_dense].reshape(-1, size)
        rows = np.repeat(np.arange(len(values)), lengths)[~is_dense]
        out[rows, _numbers(values.field("indices").flatten())] = numbers[~is_dense]
        return out

    def _check_sizes(self, name: str, sizes: Array) -> int:
        """The one size of all rows."""
        expected = self.widths.setdefault(name, int(sizes[0]))
        if expected == 0:
            raise ValueError(f"column {name!r} has no elements in the row {self._row(0)}; leave the column out")
        wrong = np.flatnonzero(sizes != expected)
        if len(wrong):
            raise ValueError(
                f"column {name!r} has {sizes[wrong[0]]} elements in the row {self._row(wrong[0])}, but {expected} in "
                "rows before; all rows must have the same number"
            )
        return expected

    def _refuse_nulls(self, name: str, values: pa.Array, where: str, row_length: int = 1) -> None:
        if values.null_count:
            first = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0] // row_length
            raise ValueError(
                f"column {name!r} has nulls{where}, first in the row {self._row(first)}; fill or drop them before, as "
                f"with df.na.drop(subset=[{name!r}])"
            )

    def _row(self, index: int) -> str:
        """The values of a row of the batch, by which a person finds it; Spark moves rows, so positions do not help."""
        names = self._selection.names
        values = [_shown(self._batch.column(position)[index]) for position in range(min(len(names), SHOWN_COLUMNS))]
        shown = [f"{name}={_short(repr(value))}" for name, value in zip(names, values, strict=False)]
        return f"({', '.join(shown)}{', ...' if len(names) > len(shown) else ''})"


def _shown(value: pa.Scalar) -> Any:
    """The value as an object of Python; the bytes of a string that is not UTF-8."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes()


def _is_utf8(value: pa.Scalar) -> bool:
    return isinstance(_shown(value), str)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _numbers(values: pa.Array) -> Array:
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    array: Array = values.to_numpy(zero_copy_only=False)
    return array
