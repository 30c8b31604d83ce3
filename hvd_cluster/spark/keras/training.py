"""The training of a KerasEstimator in one worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np

import hvd_cluster.keras as hvd
from hvd_cluster.core import basics
from hvd_cluster.keras.broadcasting import broadcast_model
from hvd_cluster.keras.variables import build_optimizer
from hvd_cluster.ops.objects import allgather_object, broadcast_object
from hvd_cluster.spark.estimators.checkpoints import EpochRange, RunFolder
from hvd_cluster.spark.estimators.history import BestEpoch, RowAverages, check_gpus
from hvd_cluster.spark.estimators.progress import ProgressReporter
from hvd_cluster.spark.keras.devices import gpu_count, prepare_device, require_backend
from hvd_cluster.spark.keras.epochs import EpochFirst, EpochLast, for_rank
from hvd_cluster.spark.keras.layout import KerasLayout, as_tensor
from hvd_cluster.spark.keras.payload import arrays_of, checkpoint_bytes, checkpoint_of, put_arrays, rate_of, unpacked

History = list[dict[str, Any]]


@dataclass
class KerasFit:
    """The model and the settings of a fit, which travel to the workers; ``compiling`` is for ``model.compile()``."""

    model: keras.Model
    optimizer: Any
    layout: KerasLayout
    run: RunFolder
    compiling: Mapping[str, Any] = field(default_factory=dict)
    optimizer_state: Sequence[Any] | None = None
    epochs: int = 1
    train_steps: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    callbacks: Sequence[keras.callbacks.Callback] = ()
    checkpoint_callback: Any = None
    compression: Any = None
    passes: int = 1
    terminate_on_nan: bool = False
    verbose: int = 1


def train(shard: Any, backend: str, seed: int | None, use_gpu: bool, payload: bytes) -> dict[str, Any] | None:
    """Train on the rows of ``shard``; on rank 0 the states of model and optimizer, and the history."""
    require_backend(backend)
    basics.init()
    if seed is not None:  # before the model is made, whose layers draw numbers: ranks drop other units
        keras.utils.set_random_seed((seed + basics.rank()) % 2**32)
    gpus = gpu_count() if use_gpu else 0
    check_gpus(gpus > 0)
    with keras.device(prepare_device(basics.local_rank() % gpus if gpus else None)):
        return KerasTraining(unpacked(payload), shard).run()


@dataclass(frozen=True)
class EpochSteps:
    """The steps of an epoch: all ranks take equally many. After ``own``, this rank's batches count nothing.

    ``leader`` is the rank with the most batches of its own.
    """

    rows: int
    batch_size: int
    own: int
    all: int
    leader: int
    uneven: bool

    @classmethod
    def of(cls, rows: Sequence[int], rank: int, batch_size: int, limit: int | None, passes: int) -> EpochSteps:
        """``rows`` of all ranks; the steps are a multiple of ``passes``. Raises ValueError where there are no rows."""
        if not any(rows):
            raise ValueError(
                "there are no rows to train with: the DataFrame is empty, or all of its rows are for validation"
            )
        counts = [min(-(-each // batch_size), limit or each) for each in rows]
        longest = max(counts)
        steps = -(-longest // passes) * passes
        uneven = any(count != steps for count in counts)
        return cls(rows[rank], batch_size, counts[rank], steps, counts.index(longest), uneven)

    def rows_after(self, steps: int) -> int:
        """How many rows this rank has had after so many steps of an epoch."""
        return min(self.rows, min(steps, self.own) * self.batch_size)


class KerasTraining:
    """A fit by ``model.fit``. All ranks take equally many steps; a rank without rows left takes some that weigh 0."""

    def __init__(self, fit: KerasFit, shard: Any) -> None:
        self.fit = fit
        self.shard = shard
        self.model = fit.model
        rows = allgather_object(int(shard.rows), "estimator.rows")
        self.steps = EpochSteps.of(rows, basics.rank(), shard.batch_size, fit.train_steps, fit.passes)
        self.weighted = self.steps.uneven or fit.layout.columns.weight is not None
        self.history: History = []
        self.best = BestEpoch()
        self.epochs = EpochRange.of(fit.epochs)
        self.reporter = ProgressReporter(bool(fit.verbose))
        self._batches = iter(shard)
        self._first: list[Any] = list(itertools.islice(self._batches, 1)) if self.steps.own else []
        self._filler = self._leaders_batch()

    # Start.

    def _leaders_batch(self) -> Any:
        """The first batch of the rank with the most, which weighs nothing on the others."""
        is_leader = basics.rank() == self.steps.leader
        own: Any = self.fit.layout.batch(self._first[0], self.weighted) if is_leader else None
        batch = broadcast_object(own, self.steps.leader, "estimator.batch")
        return (*batch[:2], batch[2] * 0) if self.weighted else batch

    def _prepare(self) -> None:
        """Compile and build the model, and give all ranks the state of rank 0."""
        build(self.model, self._filler[0])
        optimizer = hvd.DistributedOptimizer(
            self.fit.optimizer,
            compression=self.fit.compression or hvd.Compression.none,
            backward_passes_per_step=self.fit.passes,
            average_aggregated_gradients=True,
        )
        compile_with(self.model, optimizer, self.fit.compiling, self.fit.optimizer_state)
        if basics.rank() == 0:
            self._resume()
        self.history, self.epochs = broadcast_object((self.history, self.epochs), 0, "estimator.resume")
        broadcast_model(self.model, 0)
        scale_rate(self.model.optimizer, basics.size())

    def _resume(self) -> None:
        data = self.fit.run.read()
        if data is None:
            return
        arrays, about = checkpoint_of(data)
        best = {name.removeprefix("best_"): arrays.pop(name) for name in list(arrays) if name.startswith("best_")}
        put_arrays(self.model, arrays)
        self.history = about["history"]
        self.best = BestEpoch(**about["best"])
        if self.best.loss is not None:
            self.best.states = best or arrays
        self.epochs = EpochRange.of(self.fit.epochs, len(self.history), about["epochs"])

    # The fit.

    def run(self) -> dict[str, Any] | None:
        """All epochs; the outcome on rank 0."""
        self._prepare()
        self.model.fit(
            self._endless(),
            steps_per_epoch=self.steps.all,
            initial_epoch=len(self.history),
            epochs=self.epochs.end,
            shuffle=False,
            verbose=0,
            callbacks=[EpochFirst(self), *for_rank(self.fit.callbacks), EpochLast(self)],
        )
        return self._outcome() if basics.rank() == 0 else None

    def _endless(self) -> Iterator[Any]:
        """The batches of one epoch after the other; Keras may ask for them early."""
        steps, batches = self.steps, itertools.chain(self._first, self._batches)
        while True:
            for rows in itertools.islice(batches, steps.own):
                yield self.fit.layout.batch(rows, self.weighted)
            yield from itertools.repeat(self._filler, steps.all - steps.own)
            batches = iter(self.shard) if steps.own else iter(())

    def validated(self) -> RowAverages:
        """The averages over this rank's rows for validation."""
        averages, kept_apart = RowAverages(), self.shard.validation
        if kept_apart is None or not kept_apart.rows:
            return averages
        size = self.fit.validation_batch_size
        shard = kept_apart if size is None else kept_apart.batched(size)
        steps = min(-(-shard.rows // shard.batch_size), self.fit.validation_steps or shard.rows)
        weighted = self.fit.layout.columns.weight is not None
        batches = (self.fit.layout.batch(rows, weighted) for rows in shard)
        values = self.model.evaluate(batches, steps=steps, verbose=0, return_dict=True)
        averages.add(min(shard.rows, steps * shard.batch_size), {name: float(each) for name, each in values.items()})
        return averages

    def states(self) -> dict[str, Any]:
        """As they are in a checkpoint and in the result: with the learning rate of the user."""
        return arrays_of(self.model, 1 / basics.size())

    def save(self) -> None:
        """Write the checkpoint. It has the states of the best epoch only where they are not those of the last."""
        if self.fit.run.store is None:
            return
        is_last = self.best.epoch == self.history[-1]["epoch"]
        states = self.best.states if is_last and self.best.states else self.states()
        best = {} if is_last else {f"best_{name}": value for name, value in self.best.states.items()}
        about = {
            "history": self.history,
            "epochs": [self.epochs.first, self.epochs.end],
            "best": vars(replace(self.best, states={})),
        }
        self.fit.run.write(checkpoint_bytes({**states, **best}, about), self.history)

    def _outcome(self) -> dict[str, Any]:
        inputs = keras.tree.map_structure(lambda array: np.asarray(array[:1]), self._filler[0])
        states = self.best.states or self.states()
        return {**states, "history": self.history, "best_epoch": self.best.epoch, "inputs": inputs}


def build(model: keras.Model, inputs: Any) -> None:
    """Make the variables of ``model``, where Keras does that with the first batch only."""
    if not model.built:
        model(keras.tree.map_structure(lambda array: as_tensor(array[:1]), inputs))


def compile_with(
    model: keras.Model, optimizer: Any, arguments: Mapping[str, Any], state: Sequence[Any] | None = None
) -> None:
    """Compile ``model``; the optimizer gets the values in ``state``. Raises ValueError where they do not fit."""
    model.compile(optimizer=optimizer, **arguments)
    build_optimizer(model)
    if state is not None:
        put_arrays(model, {**arrays_of(model), "optimizer": state})


class _Scaled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The rates of another schedule times a factor; only in workers."""

    def __init__(self, schedule: Any, factor: float) -> None:
        super().__init__()
        self._schedule = schedule
        self._factor = factor

    def __call__(self, step: Any) -> Any:
        return self._schedule(step) * self._factor

    def get_config(self) -> dict[str, Any]:
        return {"schedule": self._schedule, "factor": self._factor}


def scale_rate(optimizer: Any, factor: float) -> None:
    """Multiply the learning rate of ``optimizer``, or the rates of its schedule, by ``factor``."""
    rate = rate_of(optimizer)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if rate is not None:
        rate.assign(rate * factor)
    elif isinstance(getattr(inner, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
        inner.learning_rate = _Scaled(inner._learning_rate, factor)
