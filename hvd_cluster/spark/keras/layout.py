"""Batches of rows -> what a model of Keras takes: its inputs, labels and weights, in its shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvd_cluster.spark.estimators.columns import FitColumns, Names, key_of, names_in

Array = npt.NDArray[Any]
Shape = tuple["int | None", ...]
NUMBERS = "biuf"


@dataclass(frozen=True)
class Port:
    """An input or output of a model: its name, the shape of a row, and its dtype."""

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Ports:
    """All inputs of a model, or all outputs. ``keys`` are those of a dictionary; None: they are a list, or one."""

    all: tuple[Port, ...]
    keys: tuple[str, ...] | None = None

    def packed(self, arrays: Sequence[Any]) -> Any:
        """``arrays``, one for each, as Keras takes them."""
        return packed_by(self.keys, arrays)


def packed_by(keys: Sequence[str] | None, arrays: Sequence[Any]) -> Any:
    """One array alone, several as a tuple, or by their ``keys``."""
    if keys is not None:
        return dict(zip(keys, arrays, strict=True))
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def ports_of(model: keras.Model, side: str) -> Ports | None:
    """The ports of the ``side``, "input" or "output"; None where only a call of the model would tell."""
    tensors = getattr(model, f"{side}s", None)
    if not tensors:
        return None
    structure = getattr(model, side, None)
    keys = None
    if isinstance(structure, Mapping):
        keys = tuple(str(key) for key in structure)
        tensors = list(structure.values())
    return Ports(tuple(Port(each.name, tuple(each.shape[1:]), str(each.dtype)) for each in tensors), keys)


@dataclass(frozen=True)
class KerasLayout:
    """Which arrays of a batch are inputs and labels of a model, and their shapes.

    An array comes as a matrix of shape (rows, elements). ``inputs`` and ``outputs`` have the order of the columns; None
    where the model does not say them. ``label_shapes`` has the shape of each label in a row.
    """

    columns: FitColumns
    inputs: Ports | None = None
    outputs: Ports | None = None
    label_shapes: Sequence[Sequence[int]] | None = None
    transformation: Callable[[dict[Any, Any]], Mapping[Any, Any]] | None = None

    @classmethod
    def of(
        cls, model: keras.Model, columns: FitColumns, label_shapes: Any = None, transformation: Any = None
    ) -> KerasLayout:
        """The layout for ``model``. Raises ValueError where the columns do not fit its inputs and outputs."""
        inputs = _matched(ports_of(model, "input"), columns.features, "feature_cols", "input")
        outputs = _matched(ports_of(model, "output"), columns.labels, "label_cols", "output")
        return cls(columns, inputs, outputs, label_shapes, transformation)

    def batch(self, rows: Sequence[Any], weighted: bool) -> tuple[Any, ...]:
        """Inputs, labels and, if ``weighted``, the weights of the rows, 1 where there is no column with them.

        Raises ValueError where an array does not fit its shape, or the transformation has left one out.
        """
        named = self.columns.transformed(self.columns.named(rows), self.transformation, np.ndarray)
        inputs = self.scored([named[key_of(group)] for group in self.columns.features])
        labels = [self._label(number, named[key_of(group)]) for number, group in enumerate(self.columns.labels)]
        sides = inputs, packed_by(self.outputs.keys if self.outputs else None, labels)
        if not weighted:
            return sides
        column, count = self.columns.weight, len(labels[0])
        weights = np.ones(count) if column is None else named[column].reshape(-1)
        return (*sides, weights.astype(keras.config.floatx()))

    def scored(self, matrices: Sequence[Array]) -> Any:
        """The inputs of rows, as Keras takes them. Raises ValueError."""
        if self.inputs is None:
            return packed_by(None, [_as_input(each) for each in matrices])
        pairs = zip(matrices, self.inputs.all, self.columns.features, strict=True)
        return self.inputs.packed([_fitted(array, port, group) for array, port, group in pairs])

    def inputs_alone(self, matrices: Sequence[Array]) -> Any:
        """As :meth:`scored`, after the transformation, which gets the features alone. Raises ValueError."""
        keys = list(map(key_of, self.columns.features))
        named = self.columns.scored(dict(zip(keys, matrices, strict=True)), self.transformation, np.ndarray)
        return self.scored([named[key] for key in keys])

    def in_order(self, outputs: Any) -> list[Any]:
        """The outputs of the model, one for each label. Raises ValueError where it has no output of such a name."""
        if not isinstance(outputs, Mapping):
            return list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        keys = self.outputs.keys if self.outputs else None
        names = keys or ["_".join(names_in(group)) for group in self.columns.labels]
        if set(names) != set(outputs):
            raise ValueError(
                f"the model returned outputs with the names {sorted(outputs)}, but the label columns are "
                f"{list(names)}; name them alike"
            )
        return [outputs[name] for name in names]

    def row_shapes(self) -> list[list[int]] | None:
        """The shape of each input in a row, with -1 for sizes that are not fixed."""
        if self.inputs is None:
            return None
        return [[-1 if size is None else size for size in port.shape] for port in self.inputs.all]

    def _label(self, number: int, array: Array) -> Array:
        """With as many elements as the output, it gets the shape and the dtype of the output.

        Otherwise floats get the dtype of Keras, and booleans become integers.
        """
        port = self.outputs.all[number] if self.outputs else None
        shape = self.label_shapes[number] if self.label_shapes is not None else None
        if shape is not None:
            array = _reshaped(array, shape, f"label_shapes says that a row of {self.columns.labels[number]!r} has")
        if array.dtype.kind not in NUMBERS:
            return array
        if port is not None and None not in port.shape and math.prod(array.shape[1:]) == math.prod(_known(port.shape)):
            own = array if shape is not None else array.reshape([len(array), *_known(port.shape)])
            return own.astype(port.dtype)
        kinds = {"f": keras.config.floatx(), "b": "int32"}
        return array.astype(kinds.get(array.dtype.kind, array.dtype))


def _known(shape: Shape) -> list[int]:
    return [size for size in shape if size is not None]


def _fitted(array: Array, port: Port, group: str | list[str]) -> Any:
    """Raises ValueError."""
    free = port.shape.count(None)
    if free <= 1:
        sizes = [-1 if size is None else size for size in port.shape]
        array = _reshaped(array, sizes, f"the model's input {port.name!r} for {group!r} has")
    return array.astype(port.dtype) if array.dtype.kind in NUMBERS else _as_text(array)


def _as_input(array: Array) -> Any:
    """Floats and booleans have the dtype of Keras; integers stay what they are."""
    if array.dtype.kind not in NUMBERS:
        return _as_text(array)
    return array.astype(keras.config.floatx() if array.dtype.kind in "fb" else array.dtype)


def as_tensor(array: Any) -> Any:
    """A tensor of the backend of Keras."""
    is_text = isinstance(array, np.ndarray) and array.dtype.kind not in NUMBERS
    return _as_text(array) if is_text else keras.ops.convert_to_tensor(array)


def _as_text(array: Array) -> Any:
    """Strings or bytes. Raises ValueError where the backend of Keras has no tensors of them."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"a feature has strings or binary data, such as {array.reshape(-1)[0]!r}, of which {backend} has no "
            "tensors; let transformation_fn return numbers for it, or use the backend tensorflow"
        )
    import tensorflow

    return tensorflow.convert_to_tensor(array)


def _reshaped(array: Array, sizes: Sequence[int], what: str) -> Array:
    """Raises ValueError where a row has another number of elements."""
    if list(array.shape[1:]) == list(sizes):
        return array
    try:
        return array.reshape([len(array), *sizes])
    except ValueError as error:
        raise ValueError(
            f"{what} the shape {list(sizes)} in a row, but a row has {math.prod(array.shape[1:])} elements; correct "
            "the shape or the columns"
        ) from error


def _matched(ports: Ports | None, groups: Names, name: str, side: str) -> Ports | None:
    """``ports`` in the order of the columns, which is that of a dictionary's keys by their names.

    Raises ValueError where there are not as many, or the names do not fit.
    """
    if ports is None:
        return None
    names = [port.name for port in ports.all] if ports.keys is None else list(ports.keys)
    if len(names) != len(groups):
        raise ValueError(
            f"{name} has {len(groups)} entries: {groups}, but the model has {len(names)} {side}s: {names}; give one "
            "for each. Columns in a list of their own make one entry"
        )
    given = ["_".join(names_in(group)) for group in groups]
    if len(names) == 1 or (ports.keys is None and (given == names or set(given) != set(names))):
        return ports
    if ports.keys is None:
        raise ValueError(
            f"{name} is {groups}, but the {side}s of the model have these names in another order: {names}; give the "
            "columns in that order"
        )
    if set(given) != set(names):
        raise ValueError(
            f"{name} is {groups}, but the {side}s of the model are a dictionary with the keys {names}; name the "
            "columns like them"
        )
    places = [names.index(each) for each in given]
    return Ports(tuple(ports.all[place] for place in places), tuple(names[place] for place in places))
