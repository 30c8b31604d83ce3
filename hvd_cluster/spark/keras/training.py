"""The training of a KerasEstimator in one worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np

import hvd_cluster.keras as hvd
from collectives import override
from hvd_cluster.core import basics
from hvd_cluster.elastic.shard_progress import ShardProgress
from hvd_cluster.keras.broadcasting import broadcast_model
from hvd_cluster.keras.variables import broadcast, build_optimizer
from hvd_cluster.ops.objects import allgather_object, broadcast_object
from hvd_cluster.spark.estimators.history import BestEpoch, RowAverages, check_gpus, require_rows, with_all_ranks
from hvd_cluster.spark.estimators.progress import ProgressReporter
from hvd_cluster.spark.estimators.run import EpochRange, FitSettings, RunFolder, parameter
from hvd_cluster.spark.keras.devices import Floats, floats_of, gpu_count, prepare_device, require_backend
from hvd_cluster.spark.keras.epochs import EpochFirst, EpochLast, RestOfEpoch, for_rank
from hvd_cluster.spark.keras.layout import KerasLayout, as_tensor
from hvd_cluster.spark.keras.learning_rate import StepRate, look_at_batches
from hvd_cluster.spark.keras.payload import arrays_of, checkpoint_bytes, checkpoint_of, put_arrays, unpacked

History = list[dict[str, Any]]


@dataclass
class KerasFit(FitSettings):
    """The model and the settings of a fit, which travel to the workers; ``compiling`` is for ``model.compile()``."""

    model: keras.Model
    optimizer: Any
    layout: KerasLayout
    run: RunFolder
    compiling: Mapping[str, Any] = field(default_factory=dict)
    optimizer_state: Sequence[Any] | None = None
    checkpoint_callback: Any = field(default=None, metadata=parameter("checkpoint_callback"))
    passes: int = field(default=1, metadata=parameter("backward_passes_per_step"))
    elastic: bool = False


def train(
    shard: Any, backend: str, floats: Floats, seed: int | None, use_gpu: bool, payload: bytes
) -> dict[str, Any] | None:
    """Train on the rows of ``shard``; on rank 0 the states of model and optimizer, and the history.

    ``floats`` are those of Keras in the driver.
    """
    require_backend(backend)
    basics.init()
    if seed is not None:  # before the model is made, whose layers draw numbers: ranks drop other units
        keras.utils.set_random_seed((seed + basics.rank()) % 2**32)
    gpus = gpu_count() if use_gpu else 0
    is_elastic = isinstance(shard, ShardProgress)
    if not is_elastic:  # or else the others are in the middle of a training
        check_gpus(gpus > 0)
    device = prepare_device(basics.local_rank() % gpus if gpus else None)
    with keras.device(device), floats_of(floats):
        training = ElasticKerasTraining if is_elastic else KerasTraining
        return training(unpacked(payload), shard).run()


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
        require_rows(any(rows))
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

    steps: EpochSteps
    """Those of the present call of ``model.fit``."""

    def __init__(self, fit: KerasFit, shard: Any) -> None:
        self.fit = fit
        self.shard = shard
        self.model = fit.model
        self.history: History = []
        self.best = BestEpoch()
        self.validation_rows = 0
        self.epochs = EpochRange.of(fit.epochs)
        self.reporter = ProgressReporter(bool(fit.verbose))
        self._has_averages = False
        self.callbacks = for_rank(fit.callbacks)
        self.looks_at_batches = look_at_batches(self.callbacks)
        self.rate = StepRate(self.model, basics.size())

    # Start.

    def _meet(self) -> None:
        """Tell the other ranks about the rows of this one, and hear about theirs."""
        rows = allgather_object(int(self.shard.rows), "estimator.rows")
        self.steps = EpochSteps.of(rows, basics.rank(), self.shard.batch_size, self.fit.train_steps, self.fit.passes)
        self.weighted = self.steps.uneven or self.fit.layout.columns.weight is not None
        self._batches = iter(self.shard)
        self._first: list[Any] = []
        self._filler = self._leaders_batch()

    def _leaders_batch(self) -> Any:
        """The first batch of the rank with the most, which weighs nothing on the others."""
        _, gathered = with_all_ranks(self._first_batch, lambda batch: batch, "estimator.batch")
        batch = gathered[self.steps.leader]
        return (*batch[:2], batch[2] * 0) if self.weighted else batch

    def _first_batch(self) -> Any:
        """Make that of this rank, if it has rows; the others need it where this rank is the leader."""
        rows = itertools.islice(self._batches, min(self.steps.own, 1))
        self._first = [self.fit.layout.batch(each, self.weighted) for each in rows]
        return self._first[0] if basics.rank() == self.steps.leader else None

    def _compile(self) -> None:
        """The model is built."""
        optimizer = hvd.DistributedOptimizer(
            self.fit.optimizer,
            compression=self.fit.compression or hvd.Compression.none,
            backward_passes_per_step=self.fit.passes,
            average_aggregated_gradients=True,
        )
        compile_with(self.model, optimizer, self.fit.compiling, self.fit.optimizer_state)
        if basics.rank() == 0:
            self._resume()

    def _prepare(self) -> None:
        """Build and compile the model, and give all ranks the state of rank 0."""
        self._meet()
        build(self.model, self._filler[0])
        self._compile()
        resumed = self.history, self.epochs, self._has_averages
        self.history, self.epochs, has_averages = broadcast_object(resumed, 0, "estimator.resume")
        broadcast_model(self.model, 0)
        if has_averages:
            self._put_weights_back()

    def _put_weights_back(self) -> None:
        """A checkpoint of a fit with SwapEMAWeights has the averages in their place."""
        swapper = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        swapper.set_model(self.model)
        swapper._swap_variables()

    def _resume(self) -> None:
        data = self.fit.run.read()
        if data is None:
            return
        arrays, about = checkpoint_of(data)
        best = {name.removeprefix("best_"): arrays.pop(name) for name in list(arrays) if name.startswith("best_")}
        self._load(arrays, about)
        self.history, self._has_averages = about["history"], about.get("has_averages", False)
        self.best = BestEpoch(**about["best"])
        if self.best.loss is not None:
            self.best.states = best or arrays
        self.epochs = EpochRange.of(self.fit.epochs, len(self.history), about["epochs"])

    def _load(self, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Raises ValueError for the checkpoint of another model or optimizer."""
        kind = type(self.fit.optimizer).__name__
        earlier = about.get("optimizer_class", kind)
        if earlier != kind:  # states of several optimizers have the same shapes
            raise self.fit.run.of_another(f"its optimizer was {earlier}, and now it is {kind}")
        try:
            put_arrays(self.model, arrays)
        except ValueError as error:
            raise self.fit.run.of_another(error) from error

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
            callbacks=[EpochFirst(self), *self.callbacks, EpochLast(self)],
        )
        return self._outcome() if basics.rank() == 0 else None

    def _endless(self) -> Iterator[Any]:
        """The batches of one epoch after the other; Keras may ask for them early."""
        steps, first, batches = self.steps, self._first, self._batches
        while True:
            yield from first
            for rows in itertools.islice(batches, steps.own - len(first)):
                yield self.fit.layout.batch(rows, self.weighted)
            yield from itertools.repeat(self._filler, steps.all - steps.own)
            first, batches = [], iter(self.shard) if steps.own else iter(())

    def share_averages(self) -> None:
        """Take the running averages of the rank that has seen no batch that counts nothing."""
        if self.steps.uneven:
            broadcast_model(self.model, self.steps.leader)

    def validated(self) -> RowAverages:
        """The averages over this rank's rows for validation."""
        averages, kept_apart = RowAverages(), self.shard.validation
        if kept_apart is None or not kept_apart.rows:
            return averages
        shard = self.fit.validation_shard(kept_apart)
        steps = min(-(-shard.rows // shard.batch_size), self.fit.validation_steps or shard.rows)
        weighted = self.fit.layout.columns.weight is not None
        batches = (self.fit.layout.batch(rows, weighted) for rows in shard)
        callbacks = keras.callbacks.CallbackList(self.callbacks, model=self.model)
        values = self.model.evaluate(batches, steps=steps, verbose=0, return_dict=True, callbacks=callbacks)
        averages.add(min(shard.rows, steps * shard.batch_size), {name: float(each) for name, each in values.items()})
        return averages

    def states(self) -> dict[str, Any]:
        """As they are in a checkpoint and in the result, of the present epoch."""
        return arrays_of(self.model)

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
            "has_averages": any(map(swaps, self.callbacks)),
            "optimizer_class": type(self.fit.optimizer).__name__,
        }
        self.fit.run.write(checkpoint_bytes({**states, **best}, about), self.history)

    def _outcome(self) -> dict[str, Any]:
        seen = self._filler and self._filler[0]  # None where an elastic fit had nothing left to do
        inputs = keras.tree.map_structure(lambda array: np.asarray(array[:1]), seen) if self._filler else None
        return {**self._kept(), "history": self.history, "best_epoch": self.best.epoch, "inputs": inputs}

    def _kept(self) -> dict[str, Any]:
        """The states of the epoch that is kept. Moving averages of an optimizer become the weights, as at the end."""
        best = self.best.states
        if not best or any(map(swaps, self.callbacks)):
            return best or self.states()
        put_arrays(self.model, best)
        self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        return self.states()


class ElasticKerasTraining(KerasTraining):
    """A fit on ranks that come and go. A call of ``model.fit`` has the rest of an epoch; each step is committed."""

    def run(self) -> dict[str, Any] | None:
        """All epochs; the outcome on rank 0."""
        self._filler: Any = None
        self._begun: set[int] = set()
        self._compile()
        self.shard.epoch = len(self.history)
        self.state: Any = hvd.elastic.KerasState(
            self.model, shard=self.shard, history=self.history, epochs=self.epochs, stop=False
        )
        self._first_callback = EpochFirst(self)
        hvd.elastic.run(lambda state: self._loop())(self.state)
        return self._outcome() if basics.rank() == 0 else None

    def _loop(self) -> None:
        """From the last commit on; again, when ranks have come or gone."""
        state = self.state
        self.best = broadcast_object(self.best, 0, "estimator.best")  # a rank that has come has none
        self.history, self.epochs = state.history, state.epochs
        self.rate.restart(basics.size())
        self.callbacks = for_rank(self.fit.callbacks)
        rows = max(allgather_object(int(self.shard.rows), "estimator.rows"))
        around = RestOfEpoch(self, self._first_callback, self.callbacks, -(-rows // self.shard.batch_size))
        around.begin(self._begun)
        while not state.stop:
            if len(self.history) < self.shard.epoch:
                around.end(len(self.history))
                state.stop, state.epochs = bool(self.model.stop_training), self.epochs
                state.save()  # callbacks may have changed variables
                state.commit()
            elif self.shard.epoch < self.epochs.end:
                self._train_rest(around)
            else:
                break
        around.finish()

    def _train_rest(self, around: RestOfEpoch) -> None:
        """The steps that are left in the epoch."""
        shard, epoch = self.shard, self.shard.epoch
        rows = iter(shard)
        first = next(rows, None)  # here the ranks meet, before Keras asks for batches on other threads
        if first is None:  # the ranks with the rest of the epoch have gone
            return
        left, number = shard.left, basics.rank()
        seen = shard.own[0] * shard.batch_size
        longest, own = max(left), left[number]
        uneven = any(each != longest for each in left)
        self.weighted = uneven or self.fit.layout.columns.weight is not None
        self.steps = EpochSteps(shard.rows - seen, shard.batch_size, own, longest, left.index(longest), uneven)
        self.model.fit(
            self._weighed(itertools.chain([first], rows)),
            steps_per_epoch=longest,
            initial_epoch=epoch,
            epochs=epoch + 1,
            shuffle=False,
            verbose=0,
            callbacks=[around],
        )

    def _weighed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """After its own batches, this rank has some that count nothing."""
        for number, rows in enumerate(batches):
            batch = self.fit.layout.batch(rows, self.weighted)
            self._filler = self._filler or batch
            yield batch if number < self.steps.own else (*batch[:2], batch[2] * 0)

    @override
    def share_averages(self) -> None:
        """Of the rank with the most batches; the others have had some that count nothing, or have come later.

        Without the trained variables, which are equal on all ranks: the state shall see no change of them.
        """
        counts = allgather_object(self._first_callback.batches, "estimator.batches")
        if min(counts) < max(counts):
            broadcast(self.model.non_trainable_weights, counts.index(max(counts)), "estimator.averages")


def swaps(callback: keras.callbacks.Callback) -> bool:
    """Whether ``callback`` exchanges the weights for the optimizer's moving averages from one epoch to the next."""
    return isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch


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
