"""The scores of rows, in a Python worker of Spark: columns of Arrow -> the model, loaded once -> columns of Arrow."""

from __future__ import annotations

import importlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext

from hvd_cluster.spark.estimators.outputs import OutputColumn, check_outputs
from hvd_cluster.spark.rows.columns import Column, ColumnKind, Selection, Stack
from hvd_cluster.spark.rows.conversion import Converter
from hvd_cluster.spark.rows.strings import array_bytes

__all__ = ["LoadPredict", "Predict", "Scoring"]

Array = npt.NDArray[Any]

Predict: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]
"""Inputs of shape (rows, elements), in the order of the feature columns -> outputs, whose first dimension is rows.

Inputs of strings or binary data are arrays of objects, ``str`` or ``bytes``.
"""
LoadPredict: TypeAlias = Callable[[bytes, "int | None"], Predict]
"""The bytes of a model, and the number of the GPU for it (None: the CPU) -> the model, ready to predict."""


@dataclass(frozen=True)
class LateLoader:
    """A LoadPredict whose module is imported when a model is loaded, with some ``variables`` in the environment.

    ``function`` has the full name of the function.
    """

    function: str
    variables: tuple[tuple[str, str], ...]

    def __call__(self, data: bytes, gpu: int | None) -> Predict:
        """The model in ``data``."""
        module, _, name = self.function.rpartition(".")
        if module not in sys.modules:
            os.environ.update(self.variables)
        load: LoadPredict = getattr(importlib.import_module(module), name)
        return load(data, gpu)


INPUT_BYTES, LEAST_ROWS = 256 << 10, 32  # which the caches of a processor can hold
MOST_MODELS = 3
_loaded: OrderedDict[tuple[str, int | None], Predict] = OrderedDict()


class ModelSource(Protocol):
    """How a worker gets the bytes of a model."""

    def read(self) -> bytes:
        """All of them."""


@dataclass(frozen=True)
class Scoring:
    """The work on each batch of rows. It travels in the closure of a UDF, the model by ``source``.

    ``digest`` names the bytes of the model, which ``load`` needs. With ``keep`` a row with a null gets nulls as output,
    otherwise it is an error. The columns come as :func:`packed` has them.
    """

    source: ModelSource
    digest: str
    load: LoadPredict
    selection: Selection
    outputs: tuple[OutputColumn, ...]
    keep: bool
    batch_size: int | None
    on_gpu: bool

    def batches(self, batches: Iterator[Any]) -> Iterator[pa.StructArray]:
        """A struct with a field for each output, for each batch of columns."""
        predict = self._predict()
        converter = Converter(packed(self.selection))
        for columns in batches:
            yield self._scored(predict, converter, columns if isinstance(columns, tuple) else (columns,))

    def _predict(self) -> Predict:
        key = self.digest, assigned_gpu() if self.on_gpu else None
        if key not in _loaded:
            while len(_loaded) >= MOST_MODELS:
                _loaded.popitem(last=False)
            _loaded[key] = self.load(self.source.read(), key[1])
        _loaded.move_to_end(key)
        return _loaded[key]

    def _scored(self, predict: Predict, converter: Converter, columns: Sequence[pa.Array]) -> pa.StructArray:
        names = packed(self.selection).names
        batch = pa.RecordBatch.from_arrays([_whole(column) for column in columns], names)
        if not self.keep:
            self._refuse_nulls(batch)
            return self._struct(predict, converter, batch)
        valid = np.logical_and.reduce([column.is_valid().to_numpy(zero_copy_only=False) for column in batch.columns])
        for stack in filter(is_packed, self.selection.features):
            elements = batch.column(stack.columns[0].name).flatten()
            valid &= elements.is_valid().to_numpy(zero_copy_only=False).reshape(-1, len(stack.columns)).all(1)
        if valid.all():
            return self._struct(predict, converter, batch)
        found = self._struct(predict, converter, batch.filter(pa.array(valid)))
        places = pa.array(np.cumsum(valid) - 1, mask=~valid)
        fields = [field.take(places) for field in found.flatten()]
        return pa.StructArray.from_arrays(fields, names=[f"o{number}" for number in range(len(fields))])

    def _refuse_nulls(self, batch: pa.RecordBatch) -> None:
        """Raise ValueError with the name of the column where columns that came in one array have a null."""
        for stack, arrays in zip(self.selection.features, packed(self.selection).features, strict=True):
            if not is_packed(stack) or not (elements := batch.column(arrays.columns[0].name).flatten()).null_count:
                continue
            nulls = np.flatnonzero(elements.is_null().to_numpy(zero_copy_only=False))
            width = len(stack.columns)
            row = elements.slice(nulls[0] // width * width, width)
            values = [row.slice(number, 1) for number in range(width)]
            alone = Selection((stack,), (), (False, False), 0.0)
            Converter(alone).arrays(pa.RecordBatch.from_arrays(values, alone.names))

    def _struct(self, predict: Predict, converter: Converter, batch: pa.RecordBatch) -> pa.StructArray:
        rows = batch.num_rows
        names = [f"o{number}" for number in range(len(self.outputs))]
        if not rows:
            return pa.StructArray.from_arrays([pa.array([], each.arrow_type) for each in self.outputs], names=names)
        outputs = predicted(predict, [_matrix(array) for array in converter.arrays(batch)], self.batch_size)
        check_outputs(outputs, [each.label for each in self.outputs])
        pairs = zip(self.outputs, outputs, strict=True)
        return pa.StructArray.from_arrays([column.arrow(output, rows) for column, output in pairs], names=names)


def packed(selection: Selection) -> Selection:
    """The columns as they travel to the worker: several numbers side by side as one array, vectors as arrays, too."""
    return replace(selection, features=tuple(map(_packed, selection.features)))


def _packed(stack: Stack) -> Stack:
    if is_packed(stack):
        return replace(stack, columns=(Column(stack.columns[0].name, ColumnKind.ARRAY, stack.dtype),))
    if all(each.kind is not ColumnKind.VECTOR for each in stack.columns):
        return stack
    kinds = {ColumnKind.VECTOR: ColumnKind.ARRAY}
    return replace(stack, columns=tuple(replace(each, kind=kinds.get(each.kind, each.kind)) for each in stack.columns))


def is_packed(stack: Stack) -> bool:
    """Whether the columns of ``stack`` travel as one array, which is faster for Spark and for the worker."""
    return len(stack.columns) > 1 and all(each.kind is ColumnKind.SCALAR for each in stack.columns)


def predicted(predict: Predict, inputs: Sequence[Array], batch_size: int | None = None) -> list[Array]:
    """The outputs of all rows. ``predict`` gets at most ``batch_size`` at once, or those of 256 KiB, at least 32."""
    rows = len(inputs[0])
    size = batch_size or max(LEAST_ROWS, INPUT_BYTES * rows // max(1, sum(map(array_bytes, inputs))))
    parts = [list(predict([array[first : first + size] for array in inputs])) for first in range(0, rows, max(1, size))]
    for number, part in enumerate(parts):
        _check_rows(part, min(size, rows - number * size))
    return parts[0] if len(parts) == 1 else [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _check_rows(outputs: Sequence[Array], rows: int) -> None:
    for output in outputs:
        if not output.shape or output.shape[0] != rows:
            raise ValueError(
                f"for {rows} rows the model returned an output of shape {output.shape}; its first dimension must be "
                "the rows"
            )


def assigned_gpu() -> int:
    """The GPU that Spark has assigned to this task, or else the number of the task: its host's GPUs take turns."""
    context = TaskContext.get()
    if context is None:
        return 0
    gpus = context.resources().get("gpu")
    return int(gpus.addresses[0]) if gpus is not None and gpus.addresses else int(context.partitionId())


def _matrix(array: Array) -> Array:
    return array.reshape(len(array), -1)


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
