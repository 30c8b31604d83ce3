"""The transform that the fitted models of all frameworks have in common."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.param import Param
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, StructType, UserDefinedType

from collectives import override
from hvd_cluster.spark.estimators.columns import check_kinds, names_in
from hvd_cluster.spark.estimators.model_params import ModelParams, checked_batch_size, checked_invalid, in_a_list
from hvd_cluster.spark.estimators.outputs import (
    SCALARS,
    OutputColumn,
    check_names_are_free,
    needs_width,
    output_columns,
    widths_of,
)
from hvd_cluster.spark.estimators.persistence import Persistent
from hvd_cluster.spark.estimators.scoring import LoadPredict, Scoring, is_packed, predicted
from hvd_cluster.spark.estimators.shipping import ModelShipment, digest_of
from hvd_cluster.spark.rows import columns as row_columns
from hvd_cluster.spark.rows.columns import ColumnKind, Selection
from hvd_cluster.spark.rows.strings import object_array

__all__ = ["HorovodModel"]

M = TypeVar("M", bound="HorovodModel")
Shape = Sequence[int]

STRUCT = "_hvd_outputs"
SPARK_TYPES = {dtype: name for name, dtype in SCALARS.items()}
CASE_SENSITIVE = "spark.sql.caseSensitive"


class HorovodModel(Model, ModelParams, Persistent):
    """A trained model: ``transform`` adds its outputs to a DataFrame, a column for each label.

    By Spark ML's convention a model has the uid of its estimator, and so the estimator's parameters of the same name.
    A search over parameters passes them to ``transform`` and ``copy``, which must not replace what has been trained: so
    these leave out the parameters in :attr:`TRAINED`. The setters change them.
    """

    TRAINED: ClassVar[frozenset[str]] = frozenset(
        {"history", "model", "feature_columns", "label_columns", "run_id", "_metadata", "_input_widths"}
    )

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._shipment: ModelShipment | None = None
        self._known_widths: tuple[str, Sequence[int | None]] | None = None
        listed = {name: in_a_list(given.get(name)) for name in ("feature_columns", "label_columns")}
        self._set(**{name: value for name, value in (given | listed).items() if value is not None})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shipment": None}

    @abstractmethod
    def _payload(self) -> bytes:
        """The model for the workers."""

    @staticmethod
    @abstractmethod
    def _loader() -> LoadPredict:
        """The function that loads it there; one of a module, so that it travels by its name."""

    def _input_shapes(self) -> Sequence[Shape] | None:
        """The shape of each input, with the rows as its first dimension; None where only the columns say it."""
        return None

    @override
    def copy(self: M, extra: Mapping[Param[Any], Any] | None = None) -> M:
        """A copy, which shares the model of the framework, with other values for the parameters in ``extra``."""
        kept = {param: value for param, value in (extra or {}).items() if param.name not in self.TRAINED}
        copied: M = super().copy(kept)
        return copied

    @override
    def _transform(self, dataset: DataFrame) -> DataFrame:
        selection = self._selection(dataset)
        data = self._payload()
        digest = digest_of(data)
        outputs = self._outputs(dataset, selection, data, digest)
        case_sensitive = str(dataset.sparkSession.conf.get(CASE_SENSITIVE)).lower() == "true"
        check_names_are_free(outputs, dataset.columns, case_sensitive)
        self._shipment = ModelShipment.of(dataset.sparkSession, data, digest, self._shipment)
        rule = checked_invalid(self.getHandleInvalid())
        scoring = Scoring(
            self._shipment.source,
            digest,
            self._loader(),
            selection,
            tuple(outputs),
            rule == "keep",
            checked_batch_size(self.getTransformBatchSize()),
            self.getTransformOnGpu(),
        )
        rows = _row_based(dataset)
        return _with_scores(_without_nulls(rows, selection) if rule == "skip" else rows, selection, scoring)

    def _selection(self, dataset: DataFrame) -> Selection:
        features = self._named("feature_columns", self.getFeatureColumns())
        self._named("label_columns", self.getLabelColumns())
        if self.getModel() is None:
            raise ValueError("there is no model; give one with model= or setModel")
        selection = row_columns.select_features(dataset.schema, [names_in(group) for group in features])
        check_kinds(selection.features, self._value(self._metadata) or {})
        return selection

    @staticmethod
    def _named(name: str, value: Any) -> Any:
        if not value:
            raise ValueError(f"{name} is {value!r}, but must name at least one column; set it")
        return value

    def _outputs(self, dataset: DataFrame, selection: Selection, data: bytes, digest: str) -> list[OutputColumn]:
        labels, types = self.getLabelColumns(), self._value(self._metadata) or {}
        widths: Sequence[int | None] | None = None
        if any(needs_width(label, types) for label in labels):
            widths = self._widths(dataset, selection, data, digest)
        return output_columns(labels, self.getOutputCols(), types, widths)

    def _widths(
        self, dataset: DataFrame, selection: Selection, data: bytes, digest: str
    ) -> Sequence[int | None] | None:
        """How many numbers the model returns for a row: it runs once, here; None if there is no row for that."""
        if self._known_widths is None or self._known_widths[0] != digest:
            inputs = self._trial_inputs(dataset, selection)
            if inputs is None:
                return None
            outputs = predicted(self._loader()(data, None), inputs)
            self._known_widths = digest, widths_of(outputs, self.getLabelColumns())
        return self._known_widths[1]

    def _trial_inputs(self, dataset: DataFrame, selection: Selection) -> list[npt.NDArray[Any]] | None:
        """A row of zeros where the shapes are known, otherwise the first row."""
        unknown: Sequence[Shape | None] = [None] * len(selection.features)
        shapes = self._input_shapes() or unknown
        fitted = self._value(self._input_widths) or []
        seen = fitted if len(fitted) == len(shapes) else unknown
        widths = [_width(*each) for each in zip(selection.features, shapes, seen, strict=True)]
        if None not in widths:
            pairs = zip(selection.features, widths, strict=True)
            return [np.zeros((1, width or 0), stack.dtype) for stack, width in pairs]
        if dataset.isStreaming:
            has_strings = any(stack.strings is not None for stack in selection.features)
            remedy = "call transform with a DataFrame that has a row first" if has_strings else ""
            raise ValueError(
                "the model's type of output is not known before the stream starts, because the widths of the feature "
                f"columns are not; {remedy or 'set input_shapes, such as [[-1, 28]]'}"
            )
        row = _without_nulls(dataset, selection).select(*map(_numbers, _columns(selection))).head()
        return None if row is None else _first_row(row, selection)


def _width(stack: row_columns.Stack, shape: Shape | None, seen: Any) -> int | None:
    """How many numbers a row has, if that is known: by its ``shape``, by its columns, or as the fit has ``seen`` it."""
    if stack.strings is not None:
        return None
    if shape is not None and all(size > 0 for size in shape[1:]):
        return int(np.prod(shape[1:]))
    return len(stack.columns) if all(each.kind is ColumnKind.SCALAR for each in stack.columns) else seen


def _first_row(row: Any, selection: Selection) -> list[npt.NDArray[Any]]:
    values = dict(zip(selection.names, row, strict=True))
    return [
        np.concatenate([_elements(values[each.name], each, stack.strings) for each in stack.columns])[None, :]
        for stack in selection.features
    ]


def _elements(value: Any, column: row_columns.Column, strings: type[str | bytes] | None) -> npt.NDArray[Any]:
    if strings is not None:
        return object_array([bytes(value) if strings is bytes else value])  # Spark may give a bytearray
    return np.atleast_1d(np.asarray(value, column.dtype))


def _columns(selection: Selection) -> list[row_columns.Column]:
    return [column for stack in selection.features for column in stack.columns]


def _quoted(name: str) -> Column:
    return F.col("`{}`".format(name.replace("`", "``")))


def _arguments(selection: Selection) -> list[Column]:
    """The columns for the UDF, as ``packed`` says. Spark takes ten times as long for a vector as for an array."""
    found = []
    for stack in selection.features:
        columns = [_numbers(column) for column in stack.columns]
        found += [_array(columns, stack.dtype.name)] if is_packed(stack) else columns
    return found


def _numbers(column: row_columns.Column) -> Column:
    found = _quoted(column.name)
    return F.when(found.isNotNull(), vector_to_array(found)) if column.kind is ColumnKind.VECTOR else found


def _array(columns: Sequence[Column], dtype: str) -> Column:
    return F.array(*(column.cast(SPARK_TYPES[dtype]) for column in columns))


def _without_nulls(dataset: DataFrame, selection: Selection) -> DataFrame:
    for column in _columns(selection):
        dataset = dataset.where(_quoted(column.name).isNotNull())
    return dataset


def _with_scores(dataset: DataFrame, selection: Selection, scoring: Scoring) -> DataFrame:
    fields = ", ".join(f"o{number}: {each.field_type}" for number, each in enumerate(scoring.outputs))
    scores = _arrow_udf(scoring.batches, f"struct<{fields}>")(*_arguments(selection))
    struct = _free_name(dataset.columns)
    new = {each.name: _output(each, F.col(struct)[f"o{number}"]) for number, each in enumerate(scoring.outputs)}
    return dataset.select("*", scores.alias(struct)).withColumns(new).drop(struct)


def _free_name(taken: Sequence[str]) -> str:
    """The name of a column that is there for a moment."""
    in_lower_case = {name.lower() for name in taken}
    return next(name for name in (STRUCT + "_" * count for count in itertools.count()) if name not in in_lower_case)


def _output(column: OutputColumn, field: Column) -> Column:
    return F.when(field.isNotNull(), array_to_vector(field)) if column.spark_type is None else field


def _arrow_udf(batches: Callable[[Iterator[Any]], Iterator[pa.StructArray]], spark_type: str) -> Any:
    """Raises ImportError where PySpark is too old."""
    arrow_udf = getattr(F, "arrow_udf", None)
    if arrow_udf is None:
        raise ImportError("transform needs UDFs on Arrow: pip install 'pyspark>=4.1' on the driver and the executors")

    def scores(columns: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return batches(columns)

    return arrow_udf(scores, spark_type)


def _row_based(dataset: DataFrame) -> DataFrame:
    """``dataset`` in rows where it has vectors: Spark 4.3 cannot pass them by a UDF in columns of a Parquet file.

    The condition is always true, and Spark cannot know it.
    """
    return dataset.where(F.spark_partition_id() >= 0) if _has_udt(dataset.schema) else dataset


def _has_udt(spark_type: DataType) -> bool:
    if isinstance(spark_type, StructType):
        return any(_has_udt(field.dataType) for field in spark_type.fields)
    if isinstance(spark_type, ArrayType):
        return _has_udt(spark_type.elementType)
    return isinstance(spark_type, UserDefinedType)
