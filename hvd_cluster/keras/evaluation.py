"""Validation on all ranks: each evaluates its part of the data, and all get the metrics of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from collectives import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.keras import variables
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.reports import MetricLogger

Arrays = list[npt.NDArray[Any]]


def evaluate(model: keras.Model, x: Any = None, y: Any = None, **kwargs: Any) -> dict[str, float]:
    """The metrics of ``model`` on the data of all ranks together: ``x`` and ``y`` are this rank's part of it.

    As ``model.evaluate(x, y, **kwargs, return_dict=True)``, whose other arguments these are. The parts may differ in
    size, and samples in weight: a metric of Keras consists of sums over samples, and the sums are combined, not the
    metrics, so also an AUC is that of the whole. A rank whose ``x`` has no rows takes part without any. Variables of
    metrics of your own are combined by their ``aggregation``: "sum", "mean", or the first rank's.

    All ranks call it, and get the same result. InvalidRequestError on all ranks if no rank has data.
    """
    is_empty = x is not None and _rows(x) == 0
    if not is_empty:
        model.evaluate(x, y, return_dict=True, **{"verbose": 0, **kwargs})
        variables.settle(model)
    own = None if is_empty else [variables.copied(variable) for variable in model.metrics_variables]
    found = [arrays for arrays in allgather_object(own, "keras.metrics") if arrays is not None]
    if not found:
        raise InvalidRequestError("no rank has data to evaluate; give at least one of them some rows")
    results = None if is_empty else _results(model, _combined(model, found))
    return next(each for each in allgather_object(results, "keras.results") if each is not None)


def _rows(x: Any) -> int | None:
    """The number of rows, or of batches; None where it is not known. An input of several arrays is a list or a dict."""
    first = x
    while isinstance(first, dict | list | tuple) and first:
        first = next(iter(first.values() if isinstance(first, dict) else first))
    try:
        return len(first)
    except TypeError:  # a generator, a number; a data set whose length is unknown or infinite
        return None


def _combined(model: keras.Model, found: Sequence[Arrays]) -> Arrays:
    return [
        _merged(variable.aggregation, each).astype(each[0].dtype)
        for variable, each in zip(model.metrics_variables, zip(*found, strict=True), strict=True)
    ]


def _merged(aggregation: str, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if aggregation == "sum":
        return np.asarray(np.sum([array.astype(np.float64) for array in arrays], axis=0))
    if aggregation == "mean":
        return np.asarray(np.mean([array.astype(np.float64) for array in arrays], axis=0))
    return arrays[0]


def _results(model: keras.Model, arrays: Arrays) -> dict[str, float]:
    for variable, array in zip(model.metrics_variables, arrays, strict=True):
        variables.put(variable, array)
    return {name: _as_number(value) for name, value in _named(model.get_metrics_result()).items()}


def _named(results: Mapping[str, Any]) -> dict[str, Any]:
    """Without the dicts that metrics with several results return."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        flat.update(value if isinstance(value, Mapping) else {name: value})
    return flat


def _as_number(value: Any) -> Any:
    array = variables.as_array(value) if keras.ops.is_tensor(value) else np.asarray(value)
    return float(array) if array.ndim == 0 else array


class EvaluateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of each epoch, :func:`evaluate` on this rank's part of the validation data.

    The results are in the logs as ``val_...``, the same on all ranks. Give it before the callbacks that read them, and
    no ``validation_data`` to ``fit``. Arguments: those of :func:`evaluate`, after the model.
    """

    def __init__(self, x: Any = None, y: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self._data = x, y
        self._arguments = kwargs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Evaluate."""
        results = evaluate(self.model, *self._data, **self._arguments)
        if logs is not None:
            logs.update({f"val_{name}": value for name, value in results.items()})


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of each epoch, gives all numbers of the logs their average over the ranks; each rank counts the same,
    whatever its number of samples is: see :class:`EvaluateCallback` for parts of different sizes.

    Give it before the callbacks that read the logs. ``device`` is accepted for compatibility.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average. InvalidRequestError on all ranks if they do not have numbers of the same names."""
        if logs is None or basics.size() == 1:
            return
        numbers = {name: float(value) for name, value in logs.items() if _is_number(value)}
        logs.update(_averages(allgather_object(numbers, "keras.logs")))


class MetricLoggerCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of each epoch, logs the averages of all ranks to TensorBoard, to MLflow, or to both, from rank 0.

    The step of a point is the epoch. ``samples`` is the number of samples in this rank's data, by which its metrics
    count; 1 if all ranks have as many. The logs keep this rank's values: give :class:`MetricAverageCallback` to change
    them. Other arguments, and what is raised, are those of ``hvd.MetricLogger``. All ranks give it.
    """

    def __init__(self, tensorboard: Any = None, mlflow: bool = False, prefix: str = "", samples: float = 1) -> None:
        super().__init__()
        self._curves = MetricLogger(tensorboard, mlflow, prefix)
        self._samples = samples

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average, and write. InvalidRequestError on all ranks if they do not have numbers of the same names."""
        numbers = {name: float(value) for name, value in (logs or {}).items() if _is_number(value)}
        self._curves.log(numbers, epoch, self._samples)

    def on_train_end(self, logs: Any = None) -> None:
        """Close the files."""
        self._curves.close()


def _averages(everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    first = everyone[0]
    for rank, numbers in enumerate(everyone):
        if numbers.keys() != first.keys():
            raise InvalidRequestError(
                f"the logs of the epoch have {sorted(first)} on rank 0, but {sorted(numbers)} on rank {rank}; give all "
                "ranks the same metrics, and validation_data to all of them or to none"
            )
    return {name: float(np.mean([numbers[name] for numbers in everyone])) for name in first}


def _is_number(value: Any) -> bool:
    array = np.asarray(value)
    return array.ndim == 0 and np.issubdtype(array.dtype, np.number)
