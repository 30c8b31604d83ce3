"""The parameters of fitted models, with Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

from executors import check_integer

__all__ = ["ModelParams"]

P = TypeVar("P", bound="ModelParams")

INVALID = ("error", "skip", "keep")


def model_param(name: str, doc: str) -> Param[Any]:
    dummy: Any = Params._dummy()
    return Param(dummy, name, doc)


class ModelParams(Params):
    """The parameters that the models of all frameworks have. A setter returns the model."""

    history = model_param("history", "the metrics of each epoch")
    model = model_param("model", "the model of the framework")
    feature_columns = model_param("feature_columns", "a column, or a list of columns, for each input of the model")
    label_columns = model_param("label_columns", "a column, or a list of columns, for each output of the model")
    run_id = model_param("run_id", "the name of the run")
    output_cols = model_param("output_cols", "the names of the columns that transform adds; default: LABEL__output")
    _metadata = model_param("_metadata", "the type of each column that the fit has used, as Spark writes it")
    _input_widths = model_param("_input_widths", "how many values a row of the fit has had in each input")
    handle_invalid = model_param("handle_invalid", "rows with a null among the features: 'error', 'skip' or 'keep'")
    transform_batch_size = model_param(
        "transform_batch_size", "rows in a call of the model; None: up to 256 KiB of inputs"
    )
    transform_on_gpu = model_param("transform_on_gpu", "whether transform uses the GPUs of the executors")

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(handle_invalid="error", transform_on_gpu=False)

    def _value(self, param: Param[Any]) -> Any:
        """The value, or None if there is none."""
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _replace(self: P, param: Param[Any], value: Any) -> P:
        """None removes the value."""
        self._set(**{param.name: value}) if value is not None else self.clear(param)
        return self

    def getHistory(self) -> Any:
        """The metrics of each epoch, as the estimator has recorded them."""
        return self._value(self.history)

    def get_history(self) -> Any:
        """The same as :meth:`getHistory`."""
        return self.getHistory()

    def setHistory(self: P, value: Any) -> P:
        """Set ``history``."""
        return self._replace(self.history, value)

    def getModel(self) -> Any:
        """The model of the framework itself, not a copy."""
        return self._value(self.model)

    def setModel(self: P, value: Any) -> P:
        """Set ``model``."""
        return self._replace(self.model, value)

    def getFeatureColumns(self) -> Any:
        """A column, or a list of columns, for each input of the model."""
        return self._value(self.feature_columns)

    def setFeatureColumns(self: P, value: str | Sequence[str | Sequence[str]]) -> P:
        """Set ``feature_columns``."""
        return self._replace(self.feature_columns, in_a_list(value))

    def getLabelColumns(self) -> Any:
        """A column, or a list of columns, for each output of the model."""
        return self._value(self.label_columns)

    def setLabelColumns(self: P, value: str | Sequence[str | Sequence[str]]) -> P:
        """Set ``label_columns``."""
        return self._replace(self.label_columns, in_a_list(value))

    def setLabelColoumns(self: P, value: str | Sequence[str | Sequence[str]]) -> P:
        """Horovod's spelling of :meth:`setLabelColumns`."""
        return self.setLabelColumns(value)

    def getRunId(self) -> str | None:
        """The name of the run."""
        value: str | None = self._value(self.run_id)
        return value

    def setRunId(self: P, value: str) -> P:
        """Set ``run_id``."""
        return self._replace(self.run_id, value)

    def getOutputCols(self) -> Any:
        """The names of the columns that ``transform`` adds; None means the default names."""
        return self._value(self.output_cols)

    def setOutputCols(self: P, value: str | Sequence[str]) -> P:
        """Set the names of the columns that ``transform`` adds, one for each label."""
        return self._replace(self.output_cols, in_a_list(value))

    def getHandleInvalid(self) -> Any:
        """The rule of ``transform`` for rows that have a null among the features."""
        return self._value(self.handle_invalid)

    def setHandleInvalid(self: P, value: str) -> P:
        """Set it: "error" (the default) fails, "skip" leaves such rows out, "keep" gives them null as output.

        Raises ValueError for another value.
        """
        return self._replace(self.handle_invalid, checked_invalid(value))

    def getTransformBatchSize(self) -> int | None:
        """How many rows a call of the model gets at most; None means as many as have 256 KiB of inputs, at least 32."""
        value: int | None = self._value(self.transform_batch_size)
        return value

    def setTransformBatchSize(self: P, value: int | None) -> P:
        """Set it. Raises ValueError for numbers below 1."""
        return self._replace(self.transform_batch_size, checked_batch_size(value))

    def getTransformOnGpu(self) -> bool:
        """Whether ``transform`` uses the GPUs of the executors."""
        return bool(self._value(self.transform_on_gpu))

    def setTransformOnGpu(self: P, value: bool) -> P:
        """Set it. The GPU is the one that Spark has assigned to the task, or else one by the number of the task."""
        return self._replace(self.transform_on_gpu, bool(value))


def in_a_list(value: Any) -> Any:
    """A name alone is a list of one."""
    return [value] if isinstance(value, str) else value


def checked_batch_size(value: object) -> int | None:
    """Raises ValueError for numbers below 1, TypeError for other values than numbers."""
    return None if value is None else check_integer(value, "transform_batch_size", 1)


def checked_invalid(value: object) -> Any:
    """Raises ValueError for an unknown rule."""
    if value not in INVALID:
        raise ValueError(f"handle_invalid is {value!r}, but must be one of {', '.join(map(repr, INVALID))}")
    return value
