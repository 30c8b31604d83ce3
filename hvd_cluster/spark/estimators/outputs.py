"""The columns that a transform adds: their names, their types by label, and outputs of a model -> columns of Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["OutputColumn", "check_names_are_free", "output_columns"]

Array = npt.NDArray[Any]

SCALARS = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}
FALLBACK = "double"


@dataclass(frozen=True)
class OutputColumn:
    """A column that a transform adds: a vector, or one number of the Spark type ``spark_type`` (None: a vector)."""

    name: str
    label: str
    spark_type: str | None

    @property
    def field_type(self) -> str:
        """The Spark type of the values that :meth:`arrow` makes; vectors are arrays first."""
        return self.spark_type or "array<double>"

    @property
    def arrow_type(self) -> pa.DataType:
        """The same for Arrow."""
        return pa.list_(pa.float64()) if self.spark_type is None else pa.from_numpy_dtype(SCALARS[self.spark_type])

    def arrow(self, output: Array, rows: int) -> pa.Array:
        """The values for ``output``, an array of shape (rows, ...). Raises ValueError for another shape."""
        matrix = self._matrix(output, rows)
        if self.spark_type is None:
            width = matrix.shape[1]
            offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
            return pa.ListArray.from_arrays(pa.array(offsets), pa.array(matrix.astype(np.float64).ravel()))
        return _numbers(matrix[:, 0], np.dtype(SCALARS[self.spark_type]))

    def _matrix(self, output: Array, rows: int) -> Array:
        shape = output.shape
        if not shape or shape[0] != rows:
            raise ValueError(
                f"for {rows} rows the model returned an output of shape {shape} for {self.label!r}; its first "
                "dimension must be the rows"
            )
        matrix = output.reshape(rows, -1) if output.size else output.reshape(rows, int(np.prod(shape[1:])))
        if self.spark_type is not None and matrix.shape[1] != 1:
            raise ValueError(
                f"the model returned {matrix.shape[1]} numbers for each row, an output of shape {shape}, for "
                f"{self.label!r}, whose column has one number of type {self.spark_type}; train with a vector label, or "
                "let the output have one number"
            )
        return matrix


def _numbers(values: Array, dtype: np.dtype[Any]) -> pa.Array:
    """Rounded where ``dtype`` has no fractions: then what is no finite number is null, and too large ones are cut."""
    if dtype.kind == "f":
        return pa.array(values.astype(dtype))
    exact = values.astype(np.float64)
    lost = ~np.isfinite(exact)
    rounded = np.rint(np.where(lost, 0.0, exact))
    if dtype.kind == "b":
        return pa.array(rounded != 0, mask=lost)
    limits = np.iinfo(dtype)
    is_largest = rounded >= float(limits.max)  # for 64 bits that number itself is no float
    numbers = np.clip(np.where(is_largest, 0.0, rounded), float(limits.min), None).astype(dtype)
    return pa.array(np.where(is_largest, limits.max, numbers).astype(dtype), mask=lost)


def output_columns(
    labels: Sequence[str | Sequence[str]],
    names: Sequence[str] | None,
    types: Mapping[str, str],
    widths: Sequence[int | None] | None = None,
) -> list[OutputColumn]:
    """A column for each of the ``labels``, under one of the ``names`` or ``LABEL__output``.

    ``types`` has the Spark type of the columns of labels. ``widths`` has how many numbers the model returns for a row,
    as far as that is known. Raises ValueError where the names do not fit the labels.
    """
    shown = [label if isinstance(label, str) else "_".join(label) for label in labels]
    given = [f"{label}__output" for label in shown] if names is None else list(names)
    if len(given) != len(shown) or len(set(given)) != len(given):
        raise ValueError(
            f"output_cols is {given!r}, but must have one name for each of the label columns {shown}, each name once"
        )
    known = widths or [None] * len(shown)
    kinds = [_type(label, types, width) for label, width in zip(labels, known, strict=True)]
    return [OutputColumn(*parts) for parts in zip(given, shown, kinds, strict=True)]


def needs_width(label: str | Sequence[str], types: Mapping[str, str]) -> bool:
    """Whether the type of the column depends on how many numbers the model returns."""
    return isinstance(label, str) and not types.get(label, FALLBACK).startswith(("vector", "array"))


def _type(label: str | Sequence[str], types: Mapping[str, str], width: int | None) -> str | None:
    if not isinstance(label, str) or not needs_width(label, types) or width not in (None, 1):
        return None
    found = types.get(label, FALLBACK)
    return found if found in SCALARS else FALLBACK


def widths_of(outputs: Sequence[Array], labels: Sequence[Any]) -> list[int | None]:
    """How many numbers each of the ``outputs`` has for a row. Raises ValueError for another number of outputs."""
    check_outputs(outputs, labels)
    return [int(np.prod(output.shape[1:])) if output.shape else None for output in outputs]


def check_outputs(outputs: Sequence[Array], labels: Sequence[Any]) -> None:
    """Raise ValueError unless there is one output for each label."""
    if len(outputs) != len(labels):
        raise ValueError(
            f"the model returned {len(outputs)} outputs, but there are {len(labels)} label columns: {list(labels)}; it "
            "must return one for each, in this order"
        )


def check_names_are_free(columns: Iterable[OutputColumn], existing: Iterable[str], case_sensitive: bool) -> None:
    """Raise ValueError where the DataFrame has a column of such a name already."""
    taken = {name if case_sensitive else name.lower() for name in existing}
    for column in columns:
        if (column.name if case_sensitive else column.name.lower()) in taken:
            raise ValueError(
                f"the DataFrame has a column {column.name!r} already, which transform would add; drop it, or choose "
                "another name with setOutputCols"
            )
