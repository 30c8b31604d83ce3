"""The training of a TorchEstimator in one worker."""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo  # a second of work at the first use of an optimizer, which rank 0 would have before the others

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.spark.estimators.history import (
    LOSS,
    BestEpoch,
    RowAverages,
    any_rank,
    check_gpus,
    check_rows,
    losses_of,
    over_all_ranks,
    require_finite,
)
from hvd_cluster.spark.estimators.progress import ProgressReporter
from hvd_cluster.spark.estimators.run import EpochRange, FitSettings, RunFolder, parameter
from hvd_cluster.spark.torch.batches import (
    BatchLayout,
    CombinedLoss,
    fitted_outputs,
    for_each_label,
    metric_groups,
    metric_values,
)
from hvd_cluster.spark.torch.callbacks import EarlyStopping
from hvd_cluster.spark.torch.learning_rates import scale_optimizers, scaled_state
from hvd_cluster.spark.torch.payload import (
    checkpoint_bytes,
    checkpoint_of,
    on_cpu,
    unpacked,
)
from hvd_cluster.torch.optimizer.sharded import ShardedOptimizer

ABOUT_DTYPES = "Inputs come as floats; a model with an embedding calls long() on them, or transformation_fn does."
History = list[dict[str, Any]]


@dataclass(kw_only=True)
class TorchSettings(FitSettings):
    """The settings of a fit with torch, also inside of a LightningModule."""

    losses: Any = field(default=None, metadata=parameter("loss"))
    loss_weights: Sequence[float] | None = field(default=None, metadata=parameter("loss_weights"))
    metrics: Sequence[Any] = field(default=(), metadata=parameter("metrics"))
    seed: int | None = field(default=None, metadata=parameter("random_seed"))
    use_gpu: bool = field(default=True, metadata=parameter("use_gpu"))
    sharded: bool | str = field(default=False, metadata=parameter("sharded"))


@dataclass
class TorchFit(TorchSettings):
    """The model and the settings of a fit, which travel to the workers."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    layout: BatchLayout
    run: RunFolder
    loss_constructors: Any = field(default=None, metadata=parameter("loss_constructors"))
    passes: int = field(default=1, metadata=parameter("backward_passes_per_step"))
    minibatch: Callable[..., Any] | None = field(default=None, metadata=parameter("train_minibatch_fn"))
    elastic: bool = False


def train(shard: Any, payload: bytes) -> dict[str, Any] | None:
    """Train on the rows of ``shard``; on rank 0 the states of model and optimizer, and the history."""
    fit: TorchFit = unpacked(payload)
    basics.init()
    if fit.elastic:
        return ElasticTraining(fit, shard).run()
    return Training(fit, shard).run()


def rank_device(use_gpu: bool, elastic: bool = False) -> torch.device:
    """The GPU of this rank, if there is one, or the CPU. Raises RuntimeError where only some ranks have a GPU."""
    has_gpu = use_gpu and torch.cuda.is_available()
    if not elastic:
        check_gpus(has_gpu)
    return torch.device("cuda", basics.local_rank() % torch.cuda.device_count()) if has_gpu else torch.device("cpu")


def train_minibatch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    transform_outputs: Callable[..., Any],
    loss_fn: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    sample_weights: torch.Tensor | None,
    backward_passes_per_step: int,
    batch_idx: int,
) -> tuple[Any, torch.Tensor]:
    """The inner step of a training, which a ``train_minibatch_fn`` replaces; returns outputs and loss."""
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    scaled = loss if backward_passes_per_step == 1 else loss / backward_passes_per_step
    scaled.backward()  # type: ignore[no-untyped-call]
    if (batch_idx + 1) % backward_passes_per_step == 0:
        optimizer.step()
        optimizer.zero_grad()
    return outputs, loss


def share_buffers(model: torch.nn.Module, own: int) -> None:
    """Give all ranks the buffers of the rank with the most batches; this one has had ``own``. All ranks call it.

    They have made the same steps, but only batches with rows change averages of batch norm.
    """
    counts = allgather_object(own, "estimator.batches")
    if min(counts) < max(counts):
        hvd.broadcast_parameters(list(model.named_buffers()), counts.index(max(counts)))


def any_batch(own: Any) -> bool:
    """Whether a rank has a batch; ``own`` is that of this one, or None. All ranks call it."""
    found = hvd.allreduce(torch.tensor([own is not None], device="cpu"), op=hvd.Max, name="estimator.batch")
    return bool(found.item())


class Training:
    """A fit on ranks that stay the same: each epoch ends with a join, because shards may have different sizes."""

    def __init__(self, fit: TorchFit, shard: Any) -> None:
        self.fit = fit
        self.shard = shard
        if fit.seed is not None:
            torch.manual_seed(fit.seed + basics.rank())
        self.device = rank_device(fit.use_gpu, fit.elastic)
        self.model = fit.model.to(self.device)
        self.dtype = next((each.dtype for each in self.model.parameters() if each.is_floating_point()), torch.float32)
        self.base_optimizer = fit.optimizer
        self.history: History = []
        self.best = BestEpoch()
        self.epochs = EpochRange.of(fit.epochs)
        if basics.rank() == 0:
            self._resume()
        if self.device.type != "cpu":  # a state that the user has given goes to the device of the parameters
            self.base_optimizer.load_state_dict(self.base_optimizer.state_dict())
        self.optimizer = hvd.DistributedOptimizer(
            self.base_optimizer,
            named_parameters=self.model.named_parameters(),
            compression=fit.compression or hvd.Compression.none,
            backward_passes_per_step=fit.passes,
            sharded=fit.sharded,
        )
        self._prepare_losses()
        self.reporter = ProgressReporter(bool(fit.verbose))
        self._norms = [
            each
            for each in self.model.modules()
            # A SyncBatchNorm has the rows of all ranks, and exchanges their sums.
            if isinstance(each, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(each, hvd.SyncBatchNorm)
        ]
        self._epoch = self._step = 0
        self._seen_loss: torch.Tensor | None = None
        self.scale = 1

    # Start.

    def _resume(self) -> None:
        data = self.fit.run.read()
        if data is None:
            return
        checkpoint = checkpoint_of(data)
        self._load(checkpoint)
        self.history = list(checkpoint.get("history", []))
        self.best = BestEpoch(**checkpoint.get("best", {}))
        if self.best.loss is not None and not self.best.states:
            # Copies: the optimizer takes the tensors that it loads for its own, and changes them in place.
            self.best.states = on_cpu({name: checkpoint[name] for name in ("model", "optimizer")})
        self.epochs = EpochRange.of(self.fit.epochs, len(self.history), checkpoint.get("epochs"))

    def _load(self, checkpoint: Mapping[str, Any]) -> None:
        """Raises ValueError for the checkpoint of another model or optimizer."""
        kind = type(self.base_optimizer).__name__
        earlier = checkpoint.get("optimizer_class", kind)
        try:
            if earlier != kind:
                raise ValueError(f"its optimizer was {earlier}, and now it is {kind}")
            self.model.load_state_dict(checkpoint["model"])
            self.base_optimizer.load_state_dict(checkpoint["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise self.fit.run.of_another(error) from error

    def _prepare_losses(self) -> None:
        fit, labels = self.fit, len(self.fit.layout.labels)
        losses = for_each_label(fit.losses, labels, "loss") if fit.losses is not None else self._constructed(labels)
        for loss in losses:
            if isinstance(loss, torch.nn.Module):
                loss.to(self.device)
        self._combined = CombinedLoss(losses, fit.loss_weights, fit.layout.weight is not None)
        self._metrics = metric_groups(fit.metrics, labels)

    def _constructed(self, labels: int) -> list[Any]:
        """The losses that the constructors make; each gets the values that it has arguments for."""
        values = {"model": self.model, "optimizer": self.optimizer, "device": self.device, "fit": self.fit}
        constructors = for_each_label(self.fit.loss_constructors, labels, "loss_constructors")
        return [constructor(**_accepted(constructor, values)) for constructor in constructors]

    # A step.

    def loss_fn(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss of a batch. Raises FloatingPointError for one that is not finite, where that ends the fit."""
        loss = self._combined(outputs, labels, sample_weights)
        self._seen_loss = loss.detach()
        self._check_finite(self._seen_loss)
        return self._weighed(loss)

    def _weighed(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def _check_finite(self, loss: torch.Tensor) -> None:
        if self.fit.terminate_on_nan:
            require_finite(loss, self._step, self._epoch)

    def _train_batch(self, batch: Sequence[Any], averages: RowAverages) -> None:
        inputs, labels, weights = self.fit.layout.tensors(batch, self.device, self.dtype)
        rows = len(inputs[0])
        self._seen_loss = None
        if rows == 1:  # which has no variance, so layers of batch norm use their running averages for it
            with _evaluating(self._norms):
                outputs, loss = self._minibatch(inputs, labels, weights)
        else:
            outputs, loss = self._minibatch(inputs, labels, weights)
        seen = self._seen_loss
        if seen is None:  # the user's function has a loss of its own
            seen = loss.detach()
            self._check_finite(seen)
        averages.add(rows, self._values(seen, outputs, labels))
        self._step += 1

    def _minibatch(
        self, inputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], weights: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor]:
        """The inner step. Its error, in the first step, gets a note about the tensors."""
        function, step, passes = self.fit.minibatch or train_minibatch, self._step, self.fit.passes
        try:
            found: tuple[Any, torch.Tensor] = function(
                self.model, self.optimizer, fitted_outputs, self.loss_fn, inputs, labels, weights, passes, step
            )
        except Exception as error:
            noted: Any = error  # the oldest Python that mypy looks for has no notes; PySpark needs a newer one
            if step == 0:
                noted.add_note(f"The model got {_shown(inputs)}, and the labels are {_shown(labels)}. {ABOUT_DTYPES}")
            raise
        return found

    def _values(self, loss: torch.Tensor, outputs: Any, labels: Sequence[torch.Tensor]) -> dict[Any, Any]:
        """Loss and metrics of a batch. Those on a GPU stay there, because to read one is to wait for the GPU."""
        values: dict[Any, Any] = {LOSS: loss}
        if self._metrics:
            values |= metric_values(self._metrics, *fitted_outputs(outputs, labels))
        return values if self.device.type != "cpu" else {name: float(value) for name, value in values.items()}

    def _finish_passes(self) -> None:
        """Step with the gradients of the last batches, where they are fewer than a step usually has."""
        if self.fit.minibatch is None and self._step % self.fit.passes:
            self._step_early()

    def _step_early(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it says that there are fewer passes
            self.optimizer.step()
        self.optimizer.zero_grad()

    # An epoch.

    def run(self) -> dict[str, Any] | None:
        """All epochs; the outcome on rank 0."""
        self.history, self.epochs = hvd.broadcast_object((self.history, self.epochs), 0, "estimator.resume")
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self._scale_to(basics.size())
        self._begin_training()
        for epoch in range(len(self.history), self.epochs.end):
            self._begin_epoch(epoch)
            if self.fit.sharded:
                averages = self._train_epoch_together()
            else:
                averages = self._train_epoch()
                last = hvd.join()
                hvd.broadcast_parameters(self.model.state_dict(), root_rank=last)
                hvd.broadcast_optimizer_state(self.optimizer, root_rank=last)
            if self._end_epoch(averages):
                break
        return self._outcome() if basics.rank() == 0 else None

    def _scale_to(self, size: int) -> None:
        """Learning rates are those of the user times the number of ranks."""
        scale_optimizers([self.optimizer], size / self.scale)
        self.scale = size

    def _begin_training(self) -> None:
        self.optimizer.zero_grad()
        for callback in self.fit.callbacks:
            if isinstance(callback, EarlyStopping):
                callback.check(self.shard.validation is not None)
            callback.on_train_begin(self.model, self.optimizer, self.history)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._step = epoch, 0
        self.model.train()
        self.reporter.begin()
        for callback in self.fit.callbacks:
            callback.on_epoch_begin(epoch)

    def _train_epoch(self) -> RowAverages:
        averages = RowAverages()
        for batch in itertools.islice(self.shard.torch(), self.fit.train_steps):
            self._train_batch(batch, averages)
            self._report(averages)
        self._finish_passes()
        return averages

    def _train_epoch_together(self) -> RowAverages:
        """The same, in which ranks without a batch make the steps of the others: each updates its part in all steps."""
        averages = RowAverages()
        batches = itertools.islice(self.shard.torch(), self.fit.train_steps)
        batch, own = next(batches, None), 0
        while any_batch(batch):
            if batch is not None:
                own += 1
                self._train_batch(batch, averages)
                self._report(averages)
            else:
                self._step += 1
                if self._step % self.fit.passes == 0:
                    self._step_early()
            batch = next(batches, None)
        self._finish_passes()
        share_buffers(self.model, own)
        return averages

    def _report(self, averages: RowAverages) -> None:
        if basics.rank() == 0:
            epochs = self._epoch, self.epochs.end
            self.reporter.step(*epochs, averages.rows, lambda: averages.means().get(LOSS))

    @torch.no_grad()
    def _validate(self) -> RowAverages:
        averages = RowAverages()
        self.model.eval()
        for batch in itertools.islice(self._validation_batches(), self.fit.validation_steps):
            inputs, labels, weights = self.fit.layout.tensors(batch, self.device, self.dtype)
            outputs, labels = fitted_outputs(self.model(*inputs), labels)
            loss = self._combined(outputs, labels, weights)
            averages.add(len(inputs[0]), self._values(loss, outputs, labels))
        return averages

    def _validation_batches(self) -> Iterator[Any]:
        kept_apart = self.shard.validation
        if kept_apart is None:
            return iter(())
        return iter(self.fit.validation_shard(kept_apart).torch())

    def _end_epoch(self, averages: RowAverages) -> bool:
        """Validate, exchange the averages, keep the best epoch, write the checkpoint; whether to stop."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.unite()  # rank 0 asks for its state
        total = over_all_ranks({"train": averages, "validation": self._validate()})
        check_rows(self._epoch, total, self.shard.validation is not None and basics.rank() == 0)
        self.history.append(record_of(self._epoch, total, self._metrics, self.reporter.seconds()))
        loss, validation_loss = losses_of(self.history[-1])
        stop = self._stops()
        if stop:
            self.epochs = EpochRange(self.epochs.first, self._epoch + 1)
        self._keep(validation_loss, total["validation"].rows)
        if basics.rank() == 0:
            self._save()
            self.reporter.end(self._epoch, self.epochs.end, total["train"].rows, loss, validation_loss)
        return stop

    def _stops(self) -> bool:
        """Whether a callback of any rank wants to stop."""
        if not self.fit.callbacks:
            return False
        for callback in self.fit.callbacks:
            callback.on_epoch_end(self._epoch, self.history)
        return any_rank(any(callback.stop_training for callback in self.fit.callbacks), "stop")

    def _keep(self, loss: float | None, rows: int) -> None:
        """The states of this epoch, where it is the best so far; ranks that come and go all have them."""
        measure = self.fit.measure
        if (basics.rank() == 0 or self.fit.elastic) and self.best.yields_to(loss, measure, rows):
            self.best = BestEpoch(self._epoch, loss, {} if loss is None else self._states(), measure, rows)

    def _save(self) -> None:
        """Write the checkpoint. It has the states of the best epoch only where they are not those of the last."""
        if self.fit.run.store is None:
            return
        is_last = self.best.epoch == self._epoch
        best = replace(self.best, states={}) if is_last else self.best
        about = {
            "history": self.history,
            "epochs": [self.epochs.first, self.epochs.end],
            "best": vars(best),
            "optimizer_class": type(self.base_optimizer).__name__,
        }
        states = self.best.states if is_last and self.best.states else self._states()
        self.fit.run.write(checkpoint_bytes({**states, **about}), self.history)

    def _states(self) -> dict[str, Any]:
        """As they are in a checkpoint and in the result: on the CPU, with the learning rates of the user."""
        optimizer = scaled_state(self.optimizer.state_dict(), 1 / self.scale)
        return {"model": on_cpu(self.model.state_dict()), "optimizer": optimizer}

    def _outcome(self) -> dict[str, Any]:
        return {**(self.best.states or self._states()), "history": self.history, "best_epoch": self.best.epoch}


class ElasticTraining(Training):
    """A fit on ranks that come and go: they take equally many steps, and commit their state after each."""

    def run(self) -> dict[str, Any] | None:
        """All epochs; the outcome on rank 0."""
        self.shard.epoch = len(self.history)
        self.state: Any = hvd.elastic.TorchState(
            self.model, self.optimizer, shard=self.shard, history=self.history, epochs=self.epochs, scale=1, stop=False
        )
        self._averages = RowAverages()
        hvd.elastic.run(lambda state: self._loop())(self.state)
        return self._outcome() if basics.rank() == 0 else None

    def _loop(self) -> None:
        """From the last commit on; again, when ranks have come or gone."""
        state = self.state
        self.best = hvd.broadcast_object(self.best, 0, "estimator.best")  # a rank that has come has none
        self.history, self.epochs, self.scale = state.history, state.epochs, state.scale
        self._scale_to(basics.size())
        state.scale = self.scale
        self._begin_training()
        while not state.stop:
            if len(self.history) < self.shard.epoch:
                self._epoch = len(self.history)
                state.stop = self._end_epoch(self._averages)
                state.epochs, self._averages = self.epochs, RowAverages()
                state.commit()
            elif self.shard.epoch < self.epochs.end:
                self._begin_epoch(self.shard.epoch)
                self._train_rest()
            else:
                return

    def _train_rest(self) -> None:
        """The steps that are left in the epoch."""
        averages = self._averages.copied()
        for batch in self.shard.torch():
            filler = RowAverages()  # rows that this rank has had already count nothing
            self._train_batch(batch, averages if self.shard.weight else filler)
            self.shard.advance()
            self._report(averages)
            if self._step % self.fit.passes == 0 and self.shard.epoch == self._epoch:
                self._commit(averages)
        self._finish_passes()
        self._commit(averages)

    def _commit(self, averages: RowAverages) -> None:
        """Batches after it begin again when a rank is lost, so what is kept has the rows before it."""
        self._averages = averages.copied()
        self.state.commit()

    def _weighed(self, loss: torch.Tensor) -> torch.Tensor:
        weighed: torch.Tensor = self.shard.weigh(loss)
        return weighed


def record_of(
    epoch: int, averages: Mapping[str, RowAverages], groups: Sequence[Sequence[Any]], seconds: float
) -> dict[str, Any]:
    """An epoch in the history."""
    record: dict[str, Any] = {"epoch": epoch}
    for name, part in averages.items():
        means = part.means()
        if means or name == "train":
            values = [
                [means.get((number, output), math.nan) for output in range(len(group))]
                for number, group in enumerate(groups)
            ]
            record[name] = {LOSS: means.get(LOSS, math.nan), "all_metrics": values}
    return {**record, "rows": averages["train"].rows, "seconds": seconds}


def _shown(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')} of shape {tuple(each.shape)}" for each in tensors)


def _accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that ``function`` has arguments for."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


@contextmanager
def _evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, ``modules`` are in evaluation mode."""
    changed = [module.eval() for module in modules if module.training]
    try:
        yield
    finally:
        for module in changed:
            module.train()
