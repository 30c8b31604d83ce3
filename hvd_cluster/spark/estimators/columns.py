"""The columns of a fit: which of them make which tensor of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hvd_cluster.spark.rows.columns import ColumnKind, Stack

if TYPE_CHECKING:  # an import would take a worker, which does not need PySpark, a second
    from pyspark.sql import Column, DataFrame

__all__ = ["FitColumns", "Names"]

Names: TypeAlias = "list[str | list[str]]"
FRACTIONS = ("float", "double", "decimal")


@dataclass(frozen=True)
class FitColumns:
    """The columns of a fit: a name, or a list of names, for each tensor."""

    features: Names
    labels: Names
    weight: str | None = None

    @classmethod
    def of(cls, schema: Any, settings: Mapping[str, Any]) -> FitColumns:
        """The columns that the parameters name; without ``feature_cols`` all that they do not name.

        Raises ValueError where there are no label_cols, or no columns left.
        """
        labels, features = settings["label_cols"], settings["feature_cols"]
        if not labels:
            raise ValueError("label_cols is left out; name the column of the label of each output of the model")
        weight, validation = settings["sample_weight_col"], settings["validation"]
        if features is None:
            taken = {name for group in labels for name in names_in(group)} | {weight, validation}
            features = [field.name for field in schema.fields if field.name not in taken]
        if not features:
            raise ValueError("feature_cols is left out, but the DataFrame has no columns besides those named elsewhere")
        return cls(features, labels, weight)

    def arguments(self) -> dict[str, Any]:
        """For ``run_on_dataframe``: each tensor is a matrix of its own."""
        return {
            "feature_cols": [names_in(group) for group in self.features],
            "label_cols": [names_in(group) for group in self.labels],
            "sample_weight_col": self.weight,
        }

    def keys(self) -> list[Any]:
        """The names of the tensors of a batch: features, labels and, if any, weights."""
        return [*map(key_of, self.features), *map(key_of, self.labels), *([self.weight] if self.weight else [])]

    def named(self, batch: Sequence[Any]) -> dict[Any, Any]:
        """The tensors of a batch of a shard by their names."""
        weights = [batch[2]] if self.weight else []
        return dict(zip(self.keys(), [*batch[0], *batch[1], *weights], strict=True))

    def transformed(
        self, given: Mapping[Any, Any], function: Callable[[dict[Any, Any]], Mapping[Any, Any]] | None, kind: type
    ) -> Mapping[Any, Any]:
        """The result of a ``transformation_fn`` for a batch. Raises ValueError where a value is of no such ``kind``."""
        if function is None:
            return given
        named, keys = function(dict(given)), self.keys()
        missing = [key for key in keys if not isinstance(named, Mapping) or not isinstance(named.get(key), kind)]
        if missing:
            what = "tensor" if kind.__name__ == "Tensor" else "array of NumPy"
            raise ValueError(
                f"transformation_fn returned no {what} for {missing[0]!r}; it must return a dictionary with a {what} "
                f"for each of {keys}"
            )
        return named

    def scored(
        self, given: Mapping[Any, Any], function: Callable[[dict[Any, Any]], Mapping[Any, Any]] | None, kind: type
    ) -> Mapping[Any, Any]:
        """As :meth:`transformed`, for rows without labels: it gets the features alone."""
        try:
            return FitColumns(self.features, []).transformed(given, function, kind)
        except KeyError as error:
            if error.args[:1] in [(key_of(label),) for label in self.labels]:
                raise ValueError(
                    f"transformation_fn has asked for {error.args[0]!r}, but transform gives it the features alone: "
                    f"{list(given)}; let it look whether the label is there, or set another one with "
                    "setTransformationFn"
                ) from error
            raise


def names_in(group: str | list[str]) -> list[str]:
    """The columns that make one tensor."""
    return [group] if isinstance(group, str) else list(group)


def key_of(group: str | list[str]) -> Any:
    """The name of a tensor in the batch of a ``transformation_fn``: that of its column, or a tuple of names."""
    return group if isinstance(group, str) else tuple(group)


def check_labels(labels: Names, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where a list with something for each label has another length."""
    for name in ("loss_weights", "label_shapes"):
        value = settings[name]
        if value is not None and len(value) != len(labels):
            raise ValueError(
                f"{name} has {len(value)} values, but label_cols names {len(labels)}: {labels}; give one for each label"
            )


def check_shapes(name: str, shapes: Sequence[Sequence[int]] | None, stacks: Sequence[Stack]) -> None:
    """Raise ValueError where a row of columns of numbers cannot have the shape that the parameter ``name`` says.

    ``shapes`` are those of a row. How many elements vectors and arrays have is known in the workers only.
    """
    for shape, stack in zip(shapes, stacks, strict=True) if shapes is not None else ():
        names = [column.name for column in stack.columns]
        if all(column.kind is ColumnKind.SCALAR for column in stack.columns) and not _fits(len(names), shape):
            raise ValueError(
                f"{name} says that a row of {', '.join(names)} has the shape {list(shape)}, but it has {len(names)} "
                "elements; correct the shape"
            )


def check_strings(stacks: Sequence[Stack], settings: Mapping[str, Any]) -> None:
    """Raise ValueError where features have strings or binary data, and no function makes tensors of them.

    For frameworks whose tensors have no strings.
    """
    names = [column.name for stack in stacks if stack.strings is not None for column in stack.columns]
    if names and settings["transformation_fn"] is None:
        raise ValueError(
            f"feature_cols has the columns {', '.join(names)} of strings or binary data, of which the framework "
            "has no tensors; give a transformation_fn that makes some, or index them first, as with StringIndexer"
        )


def _fits(elements: int, shape: Sequence[int]) -> bool:
    known = math.prod(size for size in shape if size != -1)
    return known > 0 and elements % known == 0 if -1 in shape else known == elements


def with_boolean_validation(df: DataFrame, validation: Any) -> DataFrame:
    """``df`` with a boolean column for the validation where that one has fractions."""
    if not isinstance(validation, str) or df.columns.count(validation) != 1:
        return df
    if df.schema[validation].dataType.typeName() not in FRACTIONS:
        return df
    from pyspark.sql import functions as F

    number = quoted(validation).cast("double")
    # For Spark NaN is more than 0. Here it becomes a null, which the fit refuses.
    return df.withColumn(validation, F.when(~F.isnan(number), number > 0))


def quoted(name: str) -> Column:
    """The column of that name, which may have dots and backticks in it."""
    from pyspark.sql import functions as F

    return F.col("`{}`".format(name.replace("`", "``")))


def metadata_of(df: DataFrame, columns: FitColumns) -> dict[str, Any]:
    """The type of each column of the fit, as Spark writes it."""
    used = {name for group in columns.features + columns.labels for name in names_in(group)}
    return {field.name: field.dataType.simpleString() for field in df.schema.fields if field.name in used}


def has_strings(columns: FitColumns, types: Mapping[str, str]) -> bool:
    """Whether features have strings or binary data. ``types`` are those of :func:`metadata_of`."""
    names = (name for group in columns.features for name in names_in(group))
    return any(_strings_of(types[name]) is not None for name in names if name in types)


def check_kinds(stacks: Sequence[Stack], types: Mapping[str, str]) -> None:
    """Raise ValueError where a feature has strings, but the fit had numbers there, or the other way round.

    ``types`` are those of :func:`metadata_of`, as far as they are known.
    """
    for stack in stacks:
        for column in stack.columns:
            trained = types.get(column.name)
            if trained is not None and _strings_of(trained) is not stack.strings:
                content = {None: "numbers", str: "strings", bytes: "binary data"}[stack.strings]
                raise ValueError(
                    f"the column {column.name!r} has {content}, but the model was trained with a column of type "
                    f"{trained}; cast it to that type"
                )


def _strings_of(spark_type: str) -> type[str | bytes] | None:
    if spark_type.startswith("string"):  # a collation may follow
        return str
    return bytes if spark_type == "binary" else None
