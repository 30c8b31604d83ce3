"""The estimator for models of Keras 3."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from collectives import override
from hvd_cluster.spark.estimators.columns import FitColumns, check_shapes, check_strings, has_strings
from hvd_cluster.spark.estimators.estimator import FitPlan, HorovodEstimator
from hvd_cluster.spark.estimators.params import PASSES, EstimatorParameter, anything, ineffective, with_parameters
from hvd_cluster.spark.estimators.parquet import to_list
from hvd_cluster.spark.estimators.run import RunFolder
from hvd_cluster.spark.keras.devices import VARIABLE, chosen_backend, chosen_floats
from hvd_cluster.spark.keras.layout import KerasLayout
from hvd_cluster.spark.keras.model import KERAS_BLOBS, KerasModel
from hvd_cluster.spark.keras.payload import custom_in, named, packed, put_arrays, unpacked
from hvd_cluster.spark.keras.training import KerasFit, build, compile_with, train
from hvd_cluster.spark.rows.columns import Stack

__all__ = ["KerasEstimator"]

logger = logging.getLogger(__name__)


def names_to_objects(name: str, value: Any) -> dict[str, Any]:
    """A dictionary by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name} is {value!r}, but must be a dictionary with names as keys")
    return dict(value)


OWN = (
    EstimatorParameter("metrics", "the metrics, as for model.compile()", [], anything),
    EstimatorParameter("custom_objects", "classes and functions of the model by name", {}, names_to_objects),
    EstimatorParameter("checkpoint_callback", "a ModelCheckpoint, whose monitor says which epoch is the best"),
    EstimatorParameter("backend_env", "variables for the environment of the workers", {}, names_to_objects),
    PASSES,
    ineffective("tensorflow_dataset_prefetch_buffer_size", 0, "Keras asks for the batches early by itself"),
)


@with_parameters(*OWN)
class KerasEstimator(HorovodEstimator):
    """Fits a model of Keras 3 to the rows of a DataFrame; :meth:`fit` returns a :class:`KerasModel`.

    ::

        model = keras.Sequential([keras.Input((28,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
        estimator = KerasEstimator(
            num_proc=4,
            model=model,
            optimizer=keras.optimizers.Adam(1e-3),
            loss="mse",
            feature_cols=["features"],
            label_cols=["y"],
            validation=0.1,
            batch_size=256,
            epochs=5,
        )
        fitted = estimator.fit(df).setOutputCols(["prediction"])
        fitted.transform(other).show()

    docs/spark-estimators.md has all parameters. The workers use the backend of Keras in the driver: TensorFlow, torch
    or JAX. Learning rates are multiplied by the number of workers in the training, because a step uses as many batches;
    the result has those of the user.
    """

    RUN_PREFIX = "keras"
    BLOB_FORMATS = KERAS_BLOBS

    @override
    def _check(self, settings: Mapping[str, Any]) -> None:
        model = settings["model"]
        if not isinstance(model, keras.Model):
            raise ValueError(f"model is {model!r}, but must be a keras.Model")
        if settings["min_num_proc"] is not None or settings["max_num_proc"] is not None:
            _check_elastic(model, settings)
        if chosen_backend() == "jax" and settings["backward_passes_per_step"] > 1:
            passes = settings["backward_passes_per_step"]
            raise ValueError(
                f"backward_passes_per_step is {passes}, which Keras on JAX does not have; make the optimizer with "
                f"gradient_accumulation_steps={passes}"
            )
        _check_compiling(model, settings)
        _check_callbacks(settings)

    @override
    def _environment(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return {VARIABLE: chosen_backend(), **settings["backend_env"]}

    @override
    def _check_features(self, settings: Mapping[str, Any], stacks: Sequence[Stack]) -> None:
        if keras.backend.backend() != "tensorflow":  # whose layers take strings
            check_strings(stacks, settings)
        names = settings["feature_cols"] or [stack.columns[0].name for stack in stacks]
        shapes = KerasLayout.of(settings["model"], FitColumns(names, settings["label_cols"])).row_shapes()
        if shapes is not None:
            known = [(shape, stack) for shape, stack in zip(shapes, stacks, strict=True) if shape.count(-1) <= 1]
            check_shapes("the model", [shape for shape, _ in known], [stack for _, stack in known])

    @override
    def _training(
        self, settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, elastic: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        payload = packed(_fit_of(settings, columns, run, elastic), settings["custom_objects"])
        unpacked(payload)  # what Keras cannot make again is an error before anything starts
        return train, (chosen_backend(), chosen_floats(), settings["random_seed"], settings["use_gpu"], payload)

    @override
    def _fitted(self, plan: FitPlan, outcome: Any) -> Any:
        settings = plan.settings
        fit: KerasFit = unpacked(plan.arguments[-1])
        build(fit.model, outcome["inputs"])
        compile_with(fit.model, fit.optimizer, fit.compiling)
        put_arrays(fit.model, outcome)
        custom = {**custom_in(dict(fit.compiling), 3), **settings["custom_objects"]}
        return KerasModel(
            history=outcome["history"],
            model=fit.model,
            feature_columns=plan.columns.features,
            label_columns=plan.columns.labels,
            custom_objects=custom or None,
            run_id=plan.run.run_id,
            _metadata=plan.metadata,
            _floatx=keras.config.floatx(),
            transformation_fn=settings["transformation_fn"] if has_strings(plan.columns, plan.metadata) else None,
        )


def _check_compiling(model: keras.Model, settings: Mapping[str, Any]) -> None:
    optimizer = settings["optimizer"]
    if optimizer is None and not model.compiled:
        raise ValueError("there is no optimizer; give one, such as keras.optimizers.Adam(), or compile the model")
    if optimizer is not None and not isinstance(optimizer, str | keras.optimizers.Optimizer):
        raise ValueError(f"optimizer is {optimizer!r}, but must be an optimizer of Keras, or its name")
    if settings["loss"] is None and not model.compiled and not _has_own_loss(model):
        raise ValueError("there is no loss; give one, such as 'mse', or compile the model")


def _check_elastic(model: keras.Model, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where a fit cannot go on when workers come or go."""
    number = f"min_num_proc is {settings['min_num_proc']} and max_num_proc {settings['max_num_proc']}, but"
    optimizer = model.optimizer if settings["optimizer"] is None else keras.optimizers.get(settings["optimizer"])
    if not model.built:
        raise ValueError(
            f"{number} the model has no variables yet, which a worker that comes later needs at once; call the model "
            "on a batch before, or give it a keras.Input"
        )
    if settings["backward_passes_per_step"] > 1:
        raise ValueError(
            f"{number} backward_passes_per_step is {settings['backward_passes_per_step']}; workers that come and go "
            "take one batch a step: leave it out, and give a larger batch_size"
        )
    if getattr(getattr(optimizer, "inner_optimizer", optimizer), "use_ema", False):
        raise ValueError(
            f"{number} the optimizer has use_ema=True, and Keras ends each part of an epoch with the averages; leave "
            "min_num_proc and max_num_proc out, or use_ema"
        )


def _has_own_loss(model: keras.Model) -> bool:
    kind, base = type(model), keras.Model
    return any(getattr(kind, name) is not getattr(base, name) for name in ("compute_loss", "train_step"))


def _check_callbacks(settings: Mapping[str, Any]) -> None:
    for callback in settings["callbacks"]:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(f"callbacks has {callback!r}, but must have callbacks of Keras only")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks has a BackupAndRestore, which restores one worker only; give store and run_id, and a fit "
                "goes on where an earlier one failed"
            )
    best = settings["checkpoint_callback"]
    if best is not None and not isinstance(best, keras.callbacks.ModelCheckpoint):
        raise ValueError(f"checkpoint_callback is {best!r}, but must be a keras.callbacks.ModelCheckpoint")


def _fit_of(settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, elastic: bool) -> KerasFit:
    model = settings["model"]
    optimizer = model.optimizer if settings["optimizer"] is None else keras.optimizers.get(settings["optimizer"])
    optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer  # compile() adds the scaling of losses again
    has_state = settings["optimizer"] is None and optimizer.built
    compiling = _compiling(model, settings, len(columns.labels))
    return KerasFit(
        model,
        optimizer,
        KerasLayout.of(model, columns, settings["label_shapes"], settings["transformation_fn"]),
        run,
        compiling=compiling,
        optimizer_state=_state_of(model) if has_state else None,
        elastic=elastic,
        **KerasFit.chosen({**settings, **compiling}),
    )


def _state_of(model: keras.Model) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]


KEPT = ("loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly", "jit_compile")


def _compiling(model: keras.Model, settings: Mapping[str, Any], labels: int) -> dict[str, Any]:
    """The arguments of ``model.compile()``: those of the user's own call, and the parameters of the estimator."""
    own = dict(getattr(getattr(model, "_compile_config", None), "config", {})) if model.compiled else {}
    if own.get("steps_per_execution", 1) != 1:
        logger.warning("steps_per_execution of the compiled model has no effect: each step is one of all workers")
    found = {name: own[name] for name in KEPT if own.get(name) is not None}
    if settings["loss"] is not None:
        found = {name: value for name, value in found.items() if name in ("run_eagerly", "jit_compile")}
        found["loss"] = _for_labels(settings["loss"], labels, "loss")
        if labels > 1 and settings["loss_weights"] is None:
            found["loss_weights"] = [1 / labels] * labels
    if settings["loss_weights"] is not None:
        found["loss_weights"] = settings["loss_weights"]
    if settings["metrics"]:
        found["metrics"] = settings["metrics"]
    return {name: _named(value, name) for name, value in found.items()}


def _for_labels(loss: Any, labels: int, name: str) -> Any:
    """One for each label. Raises ValueError for another number."""
    if labels == 1 or isinstance(loss, Mapping):
        return loss[0] if isinstance(loss, list | tuple) and len(loss) == 1 else loss
    try:
        return to_list(loss, labels)
    except ValueError as error:
        raise ValueError(f"{name} does not fit label_cols: {error}") from error


def _named(value: Any, name: str) -> Any:
    """``value`` with names for lambdas."""
    if isinstance(value, Mapping):
        return {key: _named(each, f"{name}_{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each, f"{name}_{number}") for number, each in enumerate(value)]
    return named(value, name)
