"""Batches of rows -> inputs and labels of a model of torch, its loss and its metrics."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.spark.estimators.columns import FitColumns, Names, key_of

Loss = Callable[..., torch.Tensor]
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class BatchLayout:
    """Which tensors of a batch are inputs and labels, and their shapes.

    A tensor comes as a matrix of shape (rows, elements). Strings and binary data come to the ``transformation`` as a
    list with a value for each row, or with a list of values where a feature has several columns. ``input_shapes`` has
    a shape for each input, with -1 for the rows; ``label_shapes`` one for each label, without them.
    """

    features: Names
    labels: Names
    weight: str | None = None
    input_shapes: Shapes | None = None
    label_shapes: Shapes | None = None
    transformation: Callable[[dict[Any, Any]], Mapping[Any, Any]] | None = None

    def tensors(
        self, batch: Sequence[Any], device: torch.device, dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        """Inputs, labels and weights of the rows, if any, on ``device``.

        Inputs are floats of ``dtype``, but integers that the transformation made stay integers. Labels keep theirs.
        Raises ValueError where a tensor does not fit its shape, or the transformation has left one out.
        """
        inputs, labels, named = self.shaped(batch, dtype)
        weights = named[self.weight].to(device, dtype).reshape(-1) if self.weight else None
        return [each.to(device) for each in inputs], [each.to(device) for each in labels], weights

    def shaped(
        self, batch: Sequence[Any], dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], Mapping[Any, torch.Tensor]]:
        """Inputs and labels where the batch is, as those of :meth:`tensors`, and all tensors by their names."""
        given = self._named(batch)
        named = self._transformed(given)
        inputs = [_as_input(named[key], named[key] is given.get(key), dtype) for key in map(key_of, self.features)]
        labels = [named[key] for key in map(key_of, self.labels)]
        shaped = self._shaped(inputs, self.input_shapes, "input_shapes", self.features, 1)
        return shaped, self._shaped(labels, self.label_shapes, "label_shapes", self.labels, 0), named

    def inputs(self, values: Sequence[Any], device: torch.device, dtype: torch.dtype) -> list[Any]:
        """The inputs of rows that are only scored, as those of :meth:`tensors`. Raises ValueError.

        ``values`` are tensors or lists; lists of strings come through where there is no ``transformation``. It gets the
        features alone.
        """
        keys = list(map(key_of, self.features))
        given = dict(zip(keys, map(_in_rows, self.features, values), strict=True))
        named = self._columns().scored(given, self.transformation, torch.Tensor)
        inputs = [_as_input(named[key], named[key] is given[key], dtype) for key in keys]
        shaped = self._shaped(inputs, self.input_shapes, "input_shapes", self.features, 1)
        return [each.to(device) if isinstance(each, torch.Tensor) else each for each in shaped]

    def _named(self, batch: Sequence[Any]) -> dict[Any, torch.Tensor]:
        return self._columns().named((list(map(_in_rows, self.features, batch[0])), *batch[1:]))

    def _transformed(self, given: dict[Any, torch.Tensor]) -> Mapping[Any, torch.Tensor]:
        return self._columns().transformed(given, self.transformation, torch.Tensor)

    def _columns(self) -> FitColumns:
        return FitColumns(self.features, self.labels, self.weight)

    @staticmethod
    def _shaped(tensors: list[Any], shapes: Shapes | None, name: str, columns: Names, first: int) -> list[Any]:
        """Each tensor in its shape; the number of rows stands for the dimensions before ``first``. Lists stay."""
        if shapes is None:
            return tensors
        found = []
        for tensor, shape, column in zip(tensors, shapes, columns, strict=True):
            own = list(shape[first:])
            if not isinstance(tensor, torch.Tensor):
                found.append(tensor)
                continue
            try:
                found.append(tensor.reshape([len(tensor), *own]))
            except RuntimeError as error:
                raise ValueError(
                    f"{name} says that a row of {column!r} has the shape {own}, but it has "
                    f"{math.prod(tensor.shape[1:])} elements; correct the shape"
                ) from error
        return found


def _in_rows(group: str | list[str], values: Any) -> Any:
    """Lists of strings have a list for each row; where a feature is one column, its value stands for the row."""
    return [row[0] for row in values] if isinstance(values, list) and isinstance(group, str) else values


def _as_input(tensor: Any, untouched: bool, dtype: torch.dtype) -> Any:
    if isinstance(tensor, list):
        return tensor
    return tensor.to(dtype) if untouched or tensor.is_floating_point() else tensor


def fitted_label(label: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """``label`` as the loss of ``output`` needs it.

    A label with as many elements as the output gets its shape and dtype. Otherwise one number for each row becomes a
    vector; integers, such as the numbers of classes, become int64, and floats get the dtype of the output.
    """
    if label.shape == output.shape and label.dtype == output.dtype:
        return label  # at once, because this is the usual case, and each operation takes time
    if label.numel() == output.numel():
        return label.reshape(output.shape).to(output.dtype)
    flat = label.reshape(-1) if label.dim() == 2 and label.shape[1] == 1 else label
    return flat.to(output.dtype) if label.is_floating_point() else flat.long()


def fitted_outputs(outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of the model as a list, and the labels as :func:`fitted_label` makes them. Raises ValueError."""
    found = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    odd = [type(each).__name__ for each in found if not isinstance(each, torch.Tensor)]
    if odd:
        raise ValueError(
            f"the model returned {', '.join(odd)}, but must return a tensor, or a list of them with one for each "
            "label; give a model that does"
        )
    if len(found) != len(labels):
        raise ValueError(
            f"the model has {len(found)} outputs, but label_cols names {len(labels)} columns; give one label for each "
            "output"
        )
    return found, [fitted_label(label, output) for label, output in zip(labels, found, strict=True)]


def for_each_label(values: Any, labels: int, name: str) -> list[Any]:
    """``values``, one for each label; a single one counts for all of them. Raises ValueError for another number."""
    found = list(values) if isinstance(values, list | tuple) else [values]
    if len(found) not in (1, labels):
        raise ValueError(f"{name} has {len(found)} values, but there are {labels} labels; give one, or one for each")
    if not all(map(callable, found)):
        raise ValueError(f"{name} is {values!r}, but must be a function, or a list of functions")
    return found * labels if len(found) == 1 else found


def unreduced(loss: Loss) -> Loss:
    """``loss`` with a value for each row, for weights of rows. Raises ValueError where it takes no ``reduction``."""
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        own: Any = copy.copy(loss)
        own.reduction = "none"
        return cast("Loss", own)
    if not _takes_reduction(loss):
        raise ValueError(
            f"the loss {loss!r} takes no argument reduction, but with sample_weight_col it is called with "
            "reduction='none', and must return the loss of each row; give it that argument"
        )
    return functools.partial(loss, reduction="none")


def _takes_reduction(loss: Loss) -> bool:
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).parameters
    except (TypeError, ValueError):  # a function of C
        return True
    return "reduction" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class CombinedLoss:
    """The sum of the losses of all labels, each times its weight.

    With weights of rows, the loss of each row counts times its weight, and the result is the mean over the rows.
    """

    def __init__(self, losses: Sequence[Loss], weights: Sequence[float] | None, weighted_rows: bool) -> None:
        self._weights = weights or [1 / len(losses)] * len(losses)
        self._losses = [unreduced(loss) for loss in losses] if weighted_rows else list(losses)

    def __call__(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], sample_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss of a batch, a tensor of one element. Raises ValueError for labels that do not fit."""
        parts = zip(self._losses, self._weights, outputs, labels, strict=True)
        values = [
            _times(weight, _mean(_checked(loss, output, label), sample_weights))
            for loss, weight, output, label in parts
        ]
        return functools.reduce(torch.add, values)


def _checked(loss: Loss, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """``loss`` of both. Losses of torch warn where they would repeat one of them, so that the result has no meaning."""
    if output.shape == label.shape:
        return loss(output, label)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Using a target size", UserWarning)
        try:
            return loss(output, label)
        except UserWarning as warning:
            raise ValueError(
                f"the output of the model has the shape {tuple(output.shape)}, but the label {tuple(label.shape)}; "
                "let the model return as many numbers for a row as the label has, or give label_shapes or another loss"
            ) from warning
        except IndexError as error:
            raise _of_classes(error, output, label) from error


def _of_classes(error: IndexError, output: torch.Tensor, label: torch.Tensor) -> Exception:
    """The error for labels beyond the classes of the output; ``error`` itself where the labels are no classes."""
    if label.is_floating_point() or output.ndim < 2 or not label.numel():
        return error
    classes = output.shape[1]
    return ValueError(
        f"a batch has labels from {int(label.min())} to {int(label.max())}, but the model has {classes} outputs for a "
        f"row, so the classes are 0 to {classes - 1}; correct the label column, or let the model have more outputs"
    )


def _times(weight: float, loss: torch.Tensor) -> torch.Tensor:
    return loss if weight == 1 else weight * loss  # each operation takes time in backward, too


def _mean(loss: torch.Tensor, sample_weights: torch.Tensor | None) -> torch.Tensor:
    if sample_weights is None:
        return loss
    return (loss.reshape(len(sample_weights), -1).mean(1) * sample_weights).mean()


Metrics = Sequence[Sequence[Callable[..., Any]]]


def metric_groups(metrics: Sequence[Any], labels: int) -> list[list[Callable[..., Any]]]:
    """A function for each group and label. Raises ValueError."""
    return [for_each_label(group, labels, "a group of metrics") for group in metrics]


@torch.no_grad()
def metric_values(
    groups: Metrics, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
) -> dict[tuple[int, int], Any]:
    """The value of each metric for a batch, by the numbers of its group and of the output."""
    detached = [output.detach() for output in outputs]
    return {
        (group, output): functions[output](detached[output], labels[output])
        for group, functions in enumerate(groups)
        for output in range(len(labels))
    }


def check_batch_norm(model: torch.nn.Module, synchronizes: bool = False, name: str = "sharded") -> None:
    """Raise ValueError where batch norm of ``model`` needs the rows of all workers in each step.

    The parameter ``name`` lets a worker without rows make the steps of the others.
    """
    if synchronizes or any(isinstance(each, hvd.SyncBatchNorm) for each in model.modules()):
        raise ValueError(
            f"{name} is given with batch norm over all workers, which would wait for a worker that has used up its "
            f"rows; leave out sync_batchnorm and SyncBatchNorm, or {name}"
        )
