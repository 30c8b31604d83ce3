"""Pure: which columns of a DataFrame become which arrays of a batch, or why they cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

ColumnNames: TypeAlias = "str | Sequence[str | Sequence[str]]"
"""A column, a list of columns that make one matrix, or a list with lists inside, which makes a tuple of arrays."""

SHOWN_COLUMNS = 20
MOST_ARRAYS = 256  # each takes up to two open files
DTYPES = {
    "boolean": "bool",
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "decimal": "float64",
}
INTEGERS = {"byte", "short", "integer", "long"}
AS_A_NUMBER = "turn it into a number first, as with unix_timestamp() or datediff()"
REMEDIES = {
    "string": "index it first, as with StringIndexer",
    "binary": "decode it into numbers first, or index it as a string, as with StringIndexer",
    "date": AS_A_NUMBER,
    "timestamp": AS_A_NUMBER,
    "timestamp_ntz": AS_A_NUMBER,
}
ALLOWED = (
    "columns can have numbers, booleans, decimals, arrays of these, or vectors of Spark ML; those of features can have "
    "strings or binary data"
)


class ColumnKind(Enum):
    """The content of a column in one row."""

    SCALAR = "scalar"
    ARRAY = "array"
    VECTOR = "vector"
    STRING = "string"
    BINARY = "binary"


STRINGS: dict[ColumnKind, type[str | bytes]] = {ColumnKind.STRING: str, ColumnKind.BINARY: bytes}
"""The kinds whose values have different lengths; in a batch they are objects of these types."""


@dataclass(frozen=True, slots=True)
class Column:
    """A used column, and the dtype of its values or of their elements: "object" for strings and binary data."""

    name: str
    kind: ColumnKind
    dtype: npt.DTypeLike


@dataclass(frozen=True, slots=True)
class Stack:
    """Columns that stand side by side in one array of a batch; ``single``: the user named one column, not a list."""

    columns: tuple[Column, ...]
    single: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array, which can hold the values of all columns."""
        return np.result_type(*(column.dtype for column in self.columns))

    @property
    def flat(self) -> bool:
        """Whether the array has one dimension: a scalar, a string or bytes for each row."""
        return self.single and self.columns[0].kind not in (ColumnKind.ARRAY, ColumnKind.VECTOR)

    @property
    def strings(self) -> type[str | bytes] | None:
        """The type of the objects in the array; None for numbers."""
        return STRINGS.get(self.columns[0].kind)


@dataclass(frozen=True, slots=True)
class Selection:
    """The arrays of a batch: features, then labels, then the array of ``weights``, if any.

    ``nested`` says for features and labels whether the arrays are in a tuple. ``validation`` is the column that is
    above zero in the rows for validation, or the fraction of rows for validation.
    """

    features: tuple[Stack, ...]
    labels: tuple[Stack, ...]
    nested: tuple[bool, bool]
    validation: Column | float
    weights: Stack | None = None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All arrays of a batch."""
        return self.features + self.labels + ((self.weights,) if self.weights else ())

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """For features, labels and, if any, weights: the number of arrays, and whether they are nested."""
        counts = len(self.features), len(self.labels)
        return ((*counts, 1), (*self.nested, False)) if self.weights else (counts, self.nested)

    @property
    def names(self) -> list[str]:
        """The used columns, each once."""
        names = [column.name for stack in self.stacks for column in stack.columns]
        return [*names, self.validation.name] if isinstance(self.validation, Column) else names

    @property
    def has_validation(self) -> bool:
        """Whether there are rows for validation."""
        return isinstance(self.validation, Column) or self.validation > 0


def select(
    schema: Any,
    feature_cols: ColumnNames | None,
    label_cols: ColumnNames,
    validation: float | str | None,
    sample_weight_col: str | None = None,
) -> Selection:
    """The columns that the arguments of ``run_on_dataframe`` name, in a DataFrame of this ``schema``, a ``StructType``.

    Raises ValueError for columns that do not exist or cannot be used.
    """
    columns = _Columns(schema)
    labels, labels_nested = _lists(label_cols, "label_cols")
    kept_apart = columns.validation(validation)
    weights = None if sample_weight_col is None else columns.weights(sample_weight_col)
    weighted = () if sample_weight_col is None else (_Group((sample_weight_col,), True),)
    if feature_cols is None:
        taken = {name for group in labels for name in group.names}
        feature_cols = columns.others(
            taken | {each for each in (validation, sample_weight_col) if isinstance(each, str)}
        )
    features, features_nested = _lists(feature_cols, "feature_cols")
    _check_once([("sample_weight_col", weighted), ("feature_cols", features), ("label_cols", labels)], validation)
    selection = Selection(
        tuple(columns.stack(group, "feature_cols") for group in features),
        tuple(columns.stack(group, "label_cols") for group in labels),
        (features_nested, labels_nested),
        kept_apart,
        weights,
    )
    _check_count(selection)
    return selection


def select_features(schema: Any, feature_cols: ColumnNames) -> Selection:
    """The columns of features alone, for rows that are only scored; otherwise as :func:`select`."""
    groups, nested = _lists(feature_cols, "feature_cols")
    _check_once([("feature_cols", groups)], None)
    columns = _Columns(schema)
    found = Selection(tuple(columns.stack(group, "feature_cols") for group in groups), (), (nested, False), 0.0)
    _check_count(found)
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """The names of the columns of one array."""

    names: tuple[str, ...]
    single: bool


class _Columns:
    """The columns of a schema, by name."""

    def __init__(self, schema: Any) -> None:
        self.names: list[str] = [field.name for field in schema.fields]
        self._types = {field.name: field.dataType for field in schema.fields}

    def stack(self, group: _Group, argument: str) -> Stack:
        stack = Stack(tuple(self._column(name, argument) for name in group.names), group.single)
        _check_alike(stack, argument)
        return stack

    def weights(self, name: object) -> Stack:
        if not isinstance(name, str):
            raise ValueError(f"sample_weight_col is {name!r}, but must be the name of a column")
        column = self._column(name, "sample_weight_col")
        if column.kind is not ColumnKind.SCALAR:
            raise ValueError(
                f"sample_weight_col names {name!r}, a column of type {self._types[name].simpleString()}; it must have "
                "one number for each row"
            )
        return Stack((column,), True)

    def others(self, taken: Collection[str]) -> list[str]:
        """The columns that are not ``taken``."""
        names = [name for name in self.names if name not in taken]
        if not names:
            raise ValueError("feature_cols is left out, but the DataFrame has no columns besides those named elsewhere")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"feature_cols is left out, but the DataFrame has {names.count(twice)} columns of the name {twice!r}; "
                "rename them, or name the columns of the features"
            )
        return names

    def validation(self, value: float | str | None) -> Column | float:
        if isinstance(value, str):
            return self._validation_column(value)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1:
            raise ValueError(
                f"validation is {value!r}, but must be a fraction of at least 0 and below 1, or the name of a column"
            )
        return float(value)

    def _validation_column(self, name: str) -> Column:
        self._check_there(name, "validation")
        kind = self._types[name].typeName()
        if kind != "boolean" and kind not in INTEGERS:
            raise ValueError(
                f"validation names {name!r}, a column of type {self._types[name].simpleString()}; it must be boolean, "
                "or an integer that is above 0 for the rows of the validation"
            )
        return Column(name, ColumnKind.SCALAR, DTYPES[kind])

    def _column(self, name: str, argument: str) -> Column:
        self._check_there(name, argument)
        spark_type = self._types[name]
        if type(spark_type).__name__ == "VectorUDT":
            return Column(name, ColumnKind.VECTOR, "float64")
        type_name = spark_type.typeName()
        if argument == "feature_cols" and type_name in ("string", "binary"):
            return Column(name, ColumnKind(type_name), "object")
        is_array = type_name == "array"
        element = spark_type.elementType if is_array else spark_type
        dtype = DTYPES.get(element.typeName())
        if dtype is None:
            remedy = REMEDIES.get(type_name, ALLOWED)
            raise ValueError(
                f"{argument} has the column {name!r}, which is of type {spark_type.simpleString()}; {remedy}"
            )
        return Column(name, ColumnKind.ARRAY if is_array else ColumnKind.SCALAR, dtype)

    def _check_there(self, name: str, argument: str) -> None:
        count = self.names.count(name)
        if count == 0:
            raise ValueError(
                f"{argument} names {name!r}, which the DataFrame does not have; its columns are {_shown(self.names)}"
            )
        if count > 1:
            raise ValueError(f"{argument} names {name!r}, but the DataFrame has {count} columns of that name")


def _check_alike(stack: Stack, argument: str) -> None:
    """Raise ValueError where strings or binary data stand beside columns of another kind in one array."""
    first = stack.columns[0]
    other = next((each for each in stack.columns if STRINGS.get(each.kind) is not stack.strings), None)
    if other is not None:
        kinds = (STRINGS.get(first.kind), STRINGS.get(other.kind))
        apart = [[each.name for each in stack.columns if STRINGS.get(each.kind) is kind] for kind in kinds]
        raise ValueError(
            f"{argument} has a list with both {first.name!r} ({_content(first)}) and {other.name!r} "
            f"({_content(other)}), but the columns of a list share an array; give each kind a list of its own, as in "
            f"{argument}={_shown_lists(apart)}"
        )


def _content(column: Column) -> str:
    return {ColumnKind.STRING: "strings", ColumnKind.BINARY: "binary data"}.get(column.kind, "numbers")


def _shown_lists(lists: Sequence[Sequence[str]]) -> str:
    shown = (", ".join(map(repr, names[:2])) + (", ..." if len(names) > 2 else "") for names in lists)
    return "[" + ", ".join(f"[{names}]" for names in shown) + "]"


def _lists(value: ColumnNames, argument: str) -> tuple[tuple[_Group, ...], bool]:
    """The columns of each array, and whether there is a tuple of arrays."""
    if isinstance(value, str):
        return (_Group((value,), True),), False
    if not _is_list(value) or not all(isinstance(item, str) or _is_names(item) for item in value):
        raise ValueError(f"{argument} is {value!r}, but must be the name of a column or a list of names, not empty")
    if _is_names(value):
        return (_Group(tuple(str(item) for item in value), False),), False
    groups = (_Group((item,), True) if isinstance(item, str) else _Group(tuple(item), False) for item in value)
    return tuple(groups), True


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def _is_names(value: Any) -> bool:
    return _is_list(value) and all(isinstance(name, str) for name in value)


def _check_once(named: Iterable[tuple[str, tuple[_Group, ...]]], validation: object) -> None:
    seen = {validation: "validation"} if isinstance(validation, str) else {}
    for argument, groups in named:
        for name in (name for group in groups for name in group.names):
            if seen.get(name) == argument:
                raise ValueError(f"{argument} names {name!r} twice")
            if name in seen:
                raise ValueError(f"{argument} names {name!r}, which {seen[name]} names, too")
            seen[name] = argument


def _check_count(selection: Selection) -> None:
    """Arrays of strings count twice, because they take twice as many files."""
    arrays = sum(1 if stack.strings is None else 2 for stack in selection.stacks)
    if arrays > MOST_ARRAYS:
        raise ValueError(
            f"feature_cols and label_cols ask for {arrays} arrays, but a batch has at most {MOST_ARRAYS}; columns that "
            "are in one list share an array"
        )


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN_COLUMNS])
    more = len(names) - SHOWN_COLUMNS
    return f"{shown} and {more} more" if more > 0 else shown or "none"
