"""The parameters of estimators: one table, from which the params of Spark, setters, getters and the checks come."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

from executors import check_integer
from hvd_cluster.gradients.options import PLACES
from hvd_cluster.spark.estimators.model_params import ModelParams

__all__ = ["EstimatorParameter", "EstimatorParams", "ModelParams", "ParameterEffect", "with_parameters"]

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=Params)
Convert = Callable[[str, Any], Any]


class ParameterEffect(Enum):
    """Whether a parameter does something here."""

    IMPLEMENTED = "implemented"
    NONE = "no effect"
    REFUSED = "refused"


def anything(name: str, value: Any) -> Any:
    """``value`` as it is."""
    return value


def truth(name: str, value: Any) -> bool:
    """A boolean."""
    return bool(value)


def whole(least: int) -> Convert:
    """Converts an integer of at least ``least``."""
    return lambda name, value: check_integer(value, name, least)


def a_store(name: str, value: Any) -> Any:
    """``value``. Raises ValueError where it is no Store."""
    if not hasattr(value, "saving_runs"):
        raise ValueError(f"{name} is {value!r}, but must be a Store; give Store.create(path)")
    return value


def listed(name: str, value: Any) -> list[Any]:
    """A list of its own, so that later changes to the caller's list have no effect; one value becomes a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def numbers(name: str, value: Any) -> list[float]:
    """A list of numbers."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, Real) for each in value):
        raise ValueError(f"{name} is {value!r}, but must be a list of numbers")
    return [float(each) for each in value]


def column_names(name: str, value: Any) -> list[str | list[str]]:
    """A list with a name for each tensor, or with a list of names for a tensor that several columns share."""
    groups = [value] if isinstance(value, str) else value
    if not isinstance(groups, list | tuple) or not groups or not all(map(_is_group, groups)):
        raise ValueError(
            f"{name} is {value!r}, but must be a list of names of columns, one for each tensor; a list of names inside "
            "it stands for one tensor that these columns share"
        )
    return [group if isinstance(group, str) else list(group) for group in groups]


def _is_group(group: Any) -> bool:
    names = [group] if isinstance(group, str) else group
    return isinstance(names, list | tuple) and len(names) > 0 and all(isinstance(each, str) for each in names)


def one_column(name: str, value: Any) -> str:
    """The name of a column."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, but must be the name of a column")
    return value


def folder_name(name: str, value: Any) -> str:
    """The name of a folder."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}, but must be the name of a folder, such as 'run_1'")
    return value


def shapes(name: str, value: Any) -> list[list[int]]:
    """A list of shapes; -1 may stand for the number of rows, or for what is left."""
    if not isinstance(value, list | tuple) or not all(map(_is_shape, value)):
        raise ValueError(f"{name} is {value!r}, but must be a list of shapes, such as [[-1, 1, 28, 28]]")
    return [[int(size) for size in shape] for shape in value]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(isinstance(size, int) and size >= -1 for size in shape)


def called(name: str, value: Any) -> Any:
    """A function."""
    if not callable(value):
        raise ValueError(f"{name} is {value!r}, but must be a function")
    return value


@dataclass(frozen=True)
class EstimatorParameter:
    """A parameter. ``note`` says why it has no effect, or what to do instead of it; ``accessors`` are more names."""

    name: str
    doc: str
    default: Any = None
    convert: Convert = anything
    effect: ParameterEffect = ParameterEffect.IMPLEMENTED
    note: str = ""
    accessors: tuple[str, ...] = ()

    @property
    def accessor_names(self) -> tuple[str, ...]:
        """The end of the names of its setter and getter."""
        return ("".join(word.capitalize() for word in self.name.split("_")), *self.accessors)

    def checked(self, value: Any) -> Any:
        """``value``, converted; None stands for the default. Raises ValueError."""
        given = self.default if value is None else value
        return None if given is None else self.convert(self.name, given)

    def check_effect(self, value: Any) -> None:
        """Log why a value that was given has no effect. Raises ValueError where such a value is refused."""
        if self.effect is ParameterEffect.IMPLEMENTED or value == self.default:
            return
        if self.effect is ParameterEffect.REFUSED:
            raise ValueError(f"{self.name} is {value!r}, but there is no such feature here: {self.note}")
        logger.warning("%s has no effect: %s", self.name, self.note)


def ineffective(name: str, default: Any, note: str, *accessors: str) -> EstimatorParameter:
    """A parameter that is accepted and does nothing."""
    return EstimatorParameter(name, f"has no effect: {note}", default, anything, ParameterEffect.NONE, note, accessors)


def refused(name: str, note: str) -> EstimatorParameter:
    """A parameter whose values are refused; ``note`` is the remedy."""
    return EstimatorParameter(name, f"is refused: {note}", None, anything, ParameterEffect.REFUSED, note)


def with_parameters(*table: EstimatorParameter) -> Callable[[type[P]], type[P]]:
    """Give a class the parameters of ``table``: attributes of Spark's class ``Param``, setters and getters."""

    def install(cls: type[P]) -> type[P]:
        own: dict[str, EstimatorParameter] = {**getattr(cls, "PARAMETERS", {}), **{each.name: each for each in table}}
        cls.PARAMETERS = own  # type: ignore[attr-defined]
        for parameter in table:
            _install(cls, parameter)
        keywords = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default) for each in own.values()
        ]
        cls.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return cls

    return install


def _install(cls: Any, parameter: EstimatorParameter) -> None:
    convert = functools.partial(parameter.convert, parameter.name)
    dummy: Any = Params._dummy()
    setattr(cls, parameter.name, Param(dummy, parameter.name, parameter.doc, convert))
    for accessor in parameter.accessor_names:
        for verb, method in (("set", _setter(parameter)), ("get", _getter(parameter))):
            method.__name__ = f"{verb}{accessor}"
            method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
            if method.__name__ not in cls.__dict__:
                setattr(cls, method.__name__, method)


def _setter(parameter: EstimatorParameter) -> Callable[[Any, Any], Any]:
    def set_value(self: Any, value: Any) -> Any:
        return self.setParams(**{parameter.name: value})

    set_value.__doc__ = f"Set ``{parameter.name}``: {parameter.doc}. None: the default again. Returns the estimator."
    return set_value


def _getter(parameter: EstimatorParameter) -> Callable[[Any], Any]:
    def get_value(self: Any) -> Any:
        return self.getOrDefault(parameter.name)

    get_value.__doc__ = f"The value of ``{parameter.name}``: {parameter.doc}."
    return get_value


LOCAL_ROWS = "the rows go from Spark's partitions to files of the workers, without a copy in Parquet and its readers"
NVTABULAR = "name the columns in feature_cols; encode categories before, as with StringIndexer or OneHotEncoder"


def place(name: str, value: Any) -> bool | str:
    """Where sharded parameters lie, as DistributedOptimizer has it."""
    if value not in (False, True, *PLACES):
        raise ValueError(f"{name} is {value!r}, but must be False, True, {' or '.join(map(repr, PLACES))}")
    return value if isinstance(value, str) else bool(value)


PASSES = EstimatorParameter("backward_passes_per_step", "batches whose gradients make one step", 1, whole(1))
SHARDED = EstimatorParameter(
    "sharded", "whether each worker updates its part of the parameters: True, 'host' or 'rank'", False, place
)
"""For the frameworks that have them."""

COMMON = (
    EstimatorParameter("num_proc", "number of workers; None means spark.default.parallelism", None, whole(1)),
    EstimatorParameter("min_num_proc", "the fewest workers with which an elastic fit goes on", None, whole(1)),
    EstimatorParameter("max_num_proc", "the most workers of an elastic fit", None, whole(1)),
    EstimatorParameter("backend", "a Backend, which runs the workers; None means a SparkBackend"),
    EstimatorParameter("store", "a Store for checkpoints, logs and history", None, a_store),
    EstimatorParameter("model", "the model to train; it is copied, so the given one does not change"),
    EstimatorParameter("optimizer", "the optimizer"),
    EstimatorParameter("loss", "the loss, or a list with one for each label"),
    EstimatorParameter("loss_weights", "the weight of the loss of each label; None: all the same", None, numbers),
    EstimatorParameter("metrics", "the metrics", [], listed),
    EstimatorParameter("feature_cols", "a column for each input of the model; None: all others", None, column_names),
    EstimatorParameter("label_cols", "a column for each output of the model", None, column_names),
    EstimatorParameter("sample_weight_col", "the column with the weight of each row", None, one_column),
    EstimatorParameter("validation", "the fraction of rows for validation, or a column that is above 0 in these rows"),
    EstimatorParameter("batch_size", "rows of a batch of each worker", 32, whole(1)),
    EstimatorParameter("val_batch_size", "rows of a batch in validation; None: batch_size", None, whole(1)),
    EstimatorParameter("epochs", "how often each row is seen", 1, whole(1)),
    EstimatorParameter("train_steps_per_epoch", "the most batches of a worker in an epoch; None: all", None, whole(1)),
    EstimatorParameter(
        "validation_steps_per_epoch", "the most batches of a worker in a validation; None: all", None, whole(1)
    ),
    EstimatorParameter("callbacks", "callbacks, called on each worker", [], listed),
    EstimatorParameter("gradient_compression", "a Compression for DistributedOptimizer"),
    EstimatorParameter("shuffle", "whether each epoch has its own random order", True, truth),
    EstimatorParameter("random_seed", "the seed of the framework and of the order of rows", None, whole(0)),
    EstimatorParameter("verbose", "0 for no progress in the driver; 2 to see where the ranks are", 1, whole(0)),
    EstimatorParameter(
        "run_id", "the folder of the run in the store; a checkpoint there is resumed", None, folder_name
    ),
    EstimatorParameter(
        "transformation_fn", "a function on a batch: names of columns -> tensors, to the same", None, called
    ),
    EstimatorParameter("label_shapes", "the shape of each label in a row", None, shapes),
    EstimatorParameter("use_gpu", "whether workers use GPUs where there are some", True, truth),
    EstimatorParameter("terminate_on_nan", "whether a loss that is no finite number ends the fit", False, truth),
    ineffective("compress_sparse_cols", False, "rows are not stored, and sparse vectors become dense in the batch"),
    ineffective("shuffle_buffer_size", None, "rows are mixed in windows of 16 MiB", "ShufflingBufferSize"),
    ineffective("partitions_per_process", 10, LOCAL_ROWS),
    ineffective("train_reader_num_workers", 2, LOCAL_ROWS, "TrainReaderNumWorker"),
    ineffective("val_reader_num_workers", 2, LOCAL_ROWS, "ValReaderNumWorker"),
    ineffective("reader_pool_type", "thread", LOCAL_ROWS),
    ineffective(
        "inmemory_cache_all", False, "the system's cache keeps the files of rows in memory", "InMemoryCacheAll"
    ),
    ineffective("mp_start_method", None, "the workers start no processes for rows"),
    ineffective("transformation_edit_fields", None, "transformation_fn may return tensors of any shape and dtype"),
    ineffective("transformation_removed_fields", None, "transformation_fn may leave out columns that are not used"),
    refused("continuous_cols", NVTABULAR),
    refused("categorical_cols", NVTABULAR),
    refused("data_module", "rows come from the DataFrame; use transformation_fn to change a batch"),
)
"""The parameters of all estimators."""


@with_parameters(*COMMON)
class EstimatorParams(Params):
    """The parameters of an estimator, by keyword only; each has a setter, which returns the estimator, and a getter."""

    PARAMETERS: Mapping[str, EstimatorParameter]

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._check_names(given)
        self._setDefault(**{each.name: each.default for each in self.PARAMETERS.values()})
        self.setParams(**given)

    def setParams(self, **given: Any) -> Any:
        """Set several parameters; None sets the default again.

        Raises TypeError for an unknown one, ValueError for a value that is not allowed.
        """
        self._check_names(given)
        for name in (name for name, value in given.items() if value is None):
            self.clear(self.getParam(name))
        return self._set(**{name: value for name, value in given.items() if value is not None})

    def settings(self) -> dict[str, Any]:
        """The value of each parameter, checked; a param map of Spark has values that no setter has seen.

        Raises ValueError for values that are not allowed. Logs a line for those that have no effect.
        """
        values = {}
        for name, parameter in self.PARAMETERS.items():
            values[name] = parameter.checked(self.getOrDefault(name))
            parameter.check_effect(values[name])
        return values

    def _check_names(self, given: Iterable[str]) -> None:
        for name in given:
            if name not in self.PARAMETERS:
                close = difflib.get_close_matches(name, self.PARAMETERS, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}{hint}")
