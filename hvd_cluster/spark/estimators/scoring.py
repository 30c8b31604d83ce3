"""The scores of rows, in a Python worker of Spark: columns of Arrow -> the model, loaded once -> columns of Arrow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext

from hvd_cluster.spark.estimators.outputs import OutputColumn, check_outputs
from hvd_cluster.spark.rows.columns import Selection
from hvd_cluster.spark.rows.conversion import Converter

__all__ = ["LoadPredict", "Predict", "Scoring"]

Array = npt.NDArray[Any]

Predict: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]
"""Inputs of shape (rows, elements), in the order of the feature columns -> outputs, whose first dimension is rows."""
LoadPredict: TypeAlias = Callable[[bytes, "int | None"], Predict]
"""The bytes of a model, and the number of the GPU for it (None: the CPU) -> the model, ready to predict."""

INPUT_BYTES = 4 << 20
MOST_MODELS = 3
_loaded: OrderedDict[tuple[str, int | None], Predict] = OrderedDict()


class ModelSource(Protocol):
    """How a worker gets the bytes of a model."""

    def read(self) -> bytes:
        """All of them."""


@dataclass(frozen=True)
class Scoring:
    """What a worker does with each batch of rows. It travels in the closure of a UDF, the model by ``source``.

    ``digest`` names the bytes of the model, which ``load`` needs. With ``keep`` a row with a null gets nulls as output,
    otherwise it is an error.
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
        """A struct with a field for each output, for each batch of the columns ``selection.names``."""
        predict = self._predict()
        converter = Converter(self.selection)
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
        names = self.selection.names
        batch = pa.RecordBatch.from_arrays([_whole(column) for column in columns], names)
        if not self.keep:
            return self._struct(predict, converter, batch)
        valid = np.logical_and.reduce([column.is_valid().to_numpy(zero_copy_only=False) for column in batch.columns])
        if valid.all():
            return self._struct(predict, converter, batch)
        found = self._struct(predict, converter, batch.filter(pa.array(valid)))
        places = pa.array(np.cumsum(valid) - 1, mask=~valid)
        fields = [field.take(places) for field in found.flatten()]
        return pa.StructArray.from_arrays(fields, names=[f"o{number}" for number in range(len(fields))])

    def _struct(self, predict: Predict, converter: Converter, batch: pa.RecordBatch) -> pa.StructArray:
        rows = batch.num_rows
        names = [f"o{number}" for number in range(len(self.outputs))]
        if not rows:
            return pa.StructArray.from_arrays([pa.array([], each.arrow_type) for each in self.outputs], names=names)
        outputs = predicted(predict, [_matrix(array) for array in converter.arrays(batch)], self.batch_size)
        check_outputs(outputs, [each.label for each in self.outputs])
        pairs = zip(self.outputs, outputs, strict=True)
        return pa.StructArray.from_arrays([column.arrow(output, rows) for column, output in pairs], names=names)


def predicted(predict: Predict, inputs: Sequence[Array], batch_size: int | None = None) -> list[Array]:
    """The outputs of all rows. ``predict`` gets at most ``batch_size`` at once, or as many as have 4 MiB of inputs."""
    rows = len(inputs[0])
    size = batch_size or max(1, INPUT_BYTES * rows // max(1, sum(array.nbytes for array in inputs)))
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
