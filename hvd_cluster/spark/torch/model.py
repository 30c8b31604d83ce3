"""The result of a fit with torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy.typing as npt
import torch
from pyspark import TaskContext

from collectives import override
from hvd_cluster.spark.estimators.model import HorovodModel, Shape
from hvd_cluster.spark.estimators.model_params import model_param
from hvd_cluster.spark.estimators.saved_form import BlobFormat
from hvd_cluster.spark.estimators.scoring import LoadPredict
from hvd_cluster.spark.torch.batches import BatchLayout
from hvd_cluster.spark.torch.payload import optimizer_of, packed, unpacked

__all__ = ["TorchModel"]

T = TypeVar("T", bound="TorchModel")
Array = npt.NDArray[Any]


TORCH_BLOBS = dict.fromkeys(("model", "optimizer", "loss", "loss_constructors"), BlobFormat("torch", packed, unpacked))
"""One file of ``torch.save``, so that an optimizer keeps the parameters of its model. To load it runs code."""


class TorchModel(HorovodModel):
    """A trained model of torch. All arguments are by keyword, and each has a setter and a getter.

    Args:
        history: a dictionary for each epoch.
        model: the module.
        feature_columns: a column, or a list of columns, for each input of the model. Columns of a list stand side by
            side.
        input_shapes: the shape of each input, with -1 for the rows, such as ``[[-1, 1, 28, 28]]``; None means matrices.
        label_columns: a column, or a list of columns, for each output of the model.
        optimizer: the optimizer, over the parameters of ``model``.
        run_id: the name of the run.
        _metadata: the type of each column of the fit, as Spark writes it, by name.
        loss, loss_constructors: as the estimator had them.
        transformation_fn: a function that changes the inputs in ``transform``, as that of the estimator does it, but
            gets a dictionary of the features alone; without one the model gets lists of strings or bytes.
    """

    TRAINED: ClassVar[frozenset[str]] = HorovodModel.TRAINED | {
        "input_shapes",
        "optimizer",
        "loss",
        "loss_constructors",
        "transformation_fn",
    }

    BLOB_FORMATS: ClassVar[Mapping[str, BlobFormat]] = TORCH_BLOBS

    input_shapes = model_param("input_shapes", "the shape of each input, with -1 for the rows")
    optimizer = model_param("optimizer", "the optimizer")
    loss = model_param("loss", "the loss, or a list with one for each label")
    loss_constructors = model_param("loss_constructors", "functions that make the losses")
    transformation_fn = model_param("transformation_fn", "a function that changes the inputs in transform")

    def __init__(
        self,
        *,
        history: Any = None,
        model: torch.nn.Module | None = None,
        feature_columns: Sequence[str | Sequence[str]] | None = None,
        input_shapes: Sequence[Shape] | None = None,
        label_columns: Sequence[str | Sequence[str]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        run_id: str | None = None,
        _metadata: dict[str, str] | None = None,
        loss: Any = None,
        loss_constructors: Any = None,
        transformation_fn: Callable[[dict[Any, Any]], Mapping[Any, Any]] | None = None,
    ) -> None:
        super().__init__(
            history=history,
            model=model,
            feature_columns=feature_columns,
            input_shapes=input_shapes,
            label_columns=label_columns,
            optimizer=optimizer,
            run_id=run_id,
            _metadata=_metadata,
            loss=loss,
            loss_constructors=loss_constructors,
            transformation_fn=transformation_fn,
        )

    def getInputShapes(self) -> Sequence[Shape] | None:
        """The shape of each input, with -1 for the rows."""
        return self._input_shapes()

    def setInputShapes(self: T, value: Sequence[Shape] | None) -> T:
        """Set ``input_shapes``."""
        return self._replace(self.input_shapes, value)

    def getOptimizer(self) -> torch.optim.Optimizer | None:
        """A new optimizer of the same kind over the parameters of the model, with the groups and the state."""
        optimizer, model = self._value(self.optimizer), self.getModel()
        if optimizer is None or model is None:
            return None
        return new_optimizer(optimizer, model)

    def setOptimizer(self: T, value: torch.optim.Optimizer | None) -> T:
        """Set ``optimizer``."""
        return self._replace(self.optimizer, value)

    def getLoss(self) -> Any:
        """The loss, as the estimator had it."""
        return self._value(self.loss)

    def setLoss(self: T, value: Any) -> T:
        """Set ``loss``."""
        return self._replace(self.loss, value)

    def getLossConstructors(self) -> Any:
        """The functions that make the losses, as the estimator had them."""
        return self._value(self.loss_constructors)

    def setLossConstructors(self: T, value: Any) -> T:
        """Set ``loss_constructors``."""
        return self._replace(self.loss_constructors, value)

    def getTransformationFn(self) -> Callable[[dict[Any, Any]], Mapping[Any, Any]] | None:
        """The function that changes the inputs in ``transform``."""
        function: Callable[[dict[Any, Any]], Mapping[Any, Any]] | None = self._value(self.transformation_fn)
        return function

    def setTransformationFn(self: T, value: Callable[[dict[Any, Any]], Mapping[Any, Any]] | None) -> T:
        """Set ``transformation_fn``."""
        return self._replace(self.transformation_fn, value)

    @override
    def _input_shapes(self) -> Sequence[Shape] | None:
        shapes: Sequence[Shape] | None = self._value(self.input_shapes)
        return shapes

    @override
    def _payload(self) -> bytes:
        columns = self.getFeatureColumns(), self.getLabelColumns()
        layout = BatchLayout(*columns, None, self._input_shapes(), transformation=self.getTransformationFn())
        return packed((self.getModel(), layout))

    @staticmethod
    @override
    def _loader() -> LoadPredict:
        return load_predict


def new_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` with its groups and state, over the parameters of ``model`` themselves.

    Raises ValueError where they differ from those of ``optimizer`` in number or shape.
    """
    own = optimizer_of(optimizer, model)
    if own is not optimizer:
        return own
    parameters = [parameter for group in own.param_groups for parameter in group["params"]]
    return copy.deepcopy(own, {id(each): each for each in parameters})


def load_predict(data: bytes, gpu: int | None) -> _TorchPredict:
    """The model in ``data``. Raises ValueError where a GPU is asked for and torch finds none."""
    if gpu is None:
        device = torch.device("cpu")
        if TaskContext.get() is not None:
            torch.set_num_threads(1)  # Spark has a worker for each core
    elif not torch.cuda.is_available():
        raise ValueError(
            "transform_on_gpu is set, but torch finds no GPU on this executor; leave it out, or run on executors with "
            "a GPU and a torch that can use it"
        )
    else:
        device = torch.device("cuda", gpu % torch.cuda.device_count())
    model, layout = unpacked(data)
    return _TorchPredict(model.to(device).eval(), layout, device)


class _TorchPredict:
    """The model in a process."""

    def __init__(self, model: torch.nn.Module, layout: BatchLayout, device: torch.device) -> None:
        self._model = model
        self._layout = layout
        self._device = device
        self._dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)

    @torch.inference_mode()
    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        outputs = self._model(*self._layout.inputs(list(map(_as_torch, inputs)), self._device, self._dtype))
        return [_array(output) for output in (outputs if isinstance(outputs, list | tuple) else [outputs])]


def _as_torch(array: Array) -> Any:
    """A tensor, or lists of strings."""
    if array.dtype == object:
        return array.tolist()
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _array(output: Any) -> Array:
    """Raises ValueError for an output that is no tensor."""
    if not isinstance(output, torch.Tensor):
        raise ValueError(
            f"the model returned a {type(output).__name__}, but must return a tensor, or a list or tuple of tensors"
        )
    exact = output.float() if output.is_floating_point() and output.element_size() < 4 else output
    array: Array = exact.cpu().numpy()
    return array
