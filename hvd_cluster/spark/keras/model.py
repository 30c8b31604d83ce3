"""The result of a fit with Keras."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import keras
import numpy as np
import numpy.typing as npt
from pyspark import TaskContext

from collectives import override
from hvd_cluster.keras.variables import view
from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.model import HorovodModel, Shape
from hvd_cluster.spark.estimators.model_params import model_param
from hvd_cluster.spark.estimators.saved_form import BlobFormat
from hvd_cluster.spark.estimators.scoring import LateLoader, LoadPredict
from hvd_cluster.spark.keras.devices import (
    CPU,
    VARIABLE,
    Floats,
    chosen_backend,
    chosen_floats,
    floats_of,
    gpu_count,
    prepare_device,
    require_backend,
)
from hvd_cluster.spark.keras.layout import KerasLayout
from hvd_cluster.spark.keras.payload import content_of, loaded_model, packed, saved_model, unpacked, without_optimizer

__all__ = ["KerasModel"]

K = TypeVar("K", bound="KerasModel")
Array = npt.NDArray[Any]
Transformation: TypeAlias = "Callable[[dict[Any, Any]], Mapping[Any, Any]]"

LEAST_ROWS = 32


KERAS_BLOBS = {
    **dict.fromkeys(("model", "custom_objects"), BlobFormat("model.keras", saved_model, loaded_model)),
    **dict.fromkeys(
        ("optimizer", "loss", "metrics", "callbacks", "checkpoint_callback"), BlobFormat("keras", packed, unpacked)
    ),
}
"""The model is a file of Keras, the rest a pickle. To load them runs code."""


class KerasModel(HorovodModel):
    """A trained model of Keras 3. All arguments are by keyword, and each has a setter and a getter.

    Args:
        history: a dictionary for each epoch.
        model: the model of Keras.
        feature_columns: a column, or a list of columns, for each input of the model. Columns of a list stand side by
            side.
        label_columns: a column, or a list of columns, for each output of the model.
        custom_objects: classes and functions of the model by name.
        run_id: the name of the run.
        _metadata: the type of each column of the fit, as Spark writes it, by name.
        _floatx: the dtype of floats with which the model was trained.
        transformation_fn: a function that changes the inputs in ``transform``, as that of the estimator does it, but
            gets a dictionary of the features alone.
    """

    TRAINED: ClassVar[frozenset[str]] = HorovodModel.TRAINED | {"custom_objects", "_floatx", "transformation_fn"}

    BLOB_FORMATS: ClassVar[Mapping[str, BlobFormat]] = KERAS_BLOBS

    custom_objects = model_param("custom_objects", "classes and functions of the model by name")
    _floatx = model_param("_floatx", "the dtype of floats with which the model was trained")
    transformation_fn = model_param("transformation_fn", "a function that changes the inputs in transform")

    def __init__(
        self,
        *,
        history: Any = None,
        model: keras.Model | None = None,
        feature_columns: Sequence[str | Sequence[str]] | None = None,
        label_columns: Sequence[str | Sequence[str]] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        _metadata: dict[str, str] | None = None,
        _floatx: str | None = None,
        transformation_fn: Transformation | None = None,
    ) -> None:
        self._sent: tuple[Any, Any, str, bytes] | None = None
        super().__init__(
            history=history,
            model=model,
            feature_columns=feature_columns,
            label_columns=label_columns,
            custom_objects=custom_objects,
            run_id=run_id,
            _metadata=_metadata,
            _floatx=_floatx,
            transformation_fn=transformation_fn,
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_sent": None}

    def getCustomObjects(self) -> Mapping[str, Any]:
        """Classes and functions of the model by name."""
        return self._value(self.custom_objects) or {}

    def setCustomObjects(self: K, value: Mapping[str, Any] | None) -> K:
        """Set ``custom_objects``."""
        return self._replace(self.custom_objects, value)

    def getTransformationFn(self) -> Transformation | None:
        """The function that changes the inputs in ``transform``."""
        function: Transformation | None = self._value(self.transformation_fn)
        return function

    def setTransformationFn(self: K, value: Transformation | None) -> K:
        """Set ``transformation_fn``."""
        return self._replace(self.transformation_fn, value)

    @override
    def _input_shapes(self) -> Sequence[Shape] | None:
        shapes = self._layout().row_shapes()
        return None if shapes is None else [[-1, *shape] for shape in shapes]

    def _layout(self) -> KerasLayout:
        columns = FitColumns(self.getFeatureColumns(), self.getLabelColumns())
        return KerasLayout.of(self.getModel(), columns, transformation=self.getTransformationFn())

    @override
    def _payload(self) -> bytes:
        """The same bytes as before where nothing has changed: a file of Keras has the time of its making in it."""
        model, layout = self.getModel(), self._layout()
        floats = chosen_floats(self._value(self._floatx))
        digest = hashlib.sha256(repr((floats, layout.columns, layout.inputs, layout.outputs)).encode())
        digest.update(content_of(model).encode())
        for variable in model.weights:
            digest.update(np.ascontiguousarray(view(variable)).view(np.uint8).data)
        known = self._sent
        is_known = known is not None and known[0] is model and known[1] is layout.transformation
        if known is None or not is_known or known[2] != digest.hexdigest():
            custom = self.getCustomObjects()
            content = packed((without_optimizer(model, custom), layout), custom)
            content = packed((chosen_backend(), floats, content))
            known = self._sent = (model, layout.transformation, digest.hexdigest(), content)
        return known[3]

    @staticmethod
    @override
    def _loader() -> LoadPredict:
        return LateLoader(f"{__name__}.load_predict", ((VARIABLE, chosen_backend()),))


def load_predict(data: bytes, gpu: int | None) -> _KerasPredict:
    """The model in ``data``. Raises ValueError where a GPU is asked for and Keras finds none."""
    if gpu is not None and not gpu_count():
        raise ValueError(
            "transform_on_gpu is set, but Keras finds no GPU on this executor; leave it out, or run on executors with "
            "a GPU and a backend of Keras that can use it"
        )
    device = CPU
    if TaskContext.get() is not None:
        device = prepare_device(gpu if gpu is None else gpu % gpu_count(), one_thread=True)
    backend, floats, content = unpacked(data)
    require_backend(backend)
    with keras.device(device), floats_of(floats):
        model, layout = unpacked(content)
    if backend == "tensorflow":
        model.jit_compile = False  # XLA would compile for each number of rows
    return _KerasPredict(model, layout, device, floats)


class _KerasPredict:
    """The model in a process."""

    def __init__(self, model: keras.Model, layout: KerasLayout, device: str, floats: Floats) -> None:
        self._model = model
        self._layout = layout
        self._device = device
        self._floats = floats
        self._pads = keras.backend.backend() == "jax"  # which compiles for each number of rows

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        rows = len(inputs[0])
        size = max(LEAST_ROWS, 1 << (rows - 1).bit_length()) if self._pads else rows
        arrays = inputs if size == rows else [_padded(array, size) for array in inputs]
        with keras.device(self._device), floats_of(self._floats):
            outputs = self._model.predict_on_batch(self._layout.inputs_alone(arrays))
        return [_array(output)[:rows] for output in self._layout.in_order(outputs)]


def _padded(array: Array, size: int) -> Array:
    """``array`` with copies of its last row, up to ``size`` rows."""
    found: Array = array[np.minimum(np.arange(size), len(array) - 1)]
    return found


def _array(output: Any) -> Array:
    array = np.asarray(output)
    is_known = array.dtype.kind in "biu" or (array.dtype.kind == "f" and array.dtype.itemsize >= 4)
    return array if is_known else array.astype(np.float32)
