"""The values that a module logs in its steps: averages over the rows of all ranks, in place of those of one rank."""

from __future__ import annotations

import functools
import inspect
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.spark.lightning.modules import lightning_base

METRIC = "metric"
OTHER_NAMES = {"avg": "mean", "amin": "min", "amax": "max"}


@dataclass
class LoggedValue:
    """A value of a phase on one rank, or on several. ``total`` is its sum over rows, where ``op`` is the mean.

    For a metric of torchmetrics, ``total`` is its name in the module. ``is_shown`` says whether loggers get it,
    ``has_steps`` whether they get each step, too, and ``has_both`` whether the user has asked for steps and epochs.
    """

    op: str
    total: Any
    rows: int
    is_shown: bool | None = None
    has_steps: bool = False
    has_both: bool = False

    def with_more(self, other: LoggedValue) -> LoggedValue:
        """Both together."""
        return replace(self, total=_combined(self.op, self.total, other.total), rows=self.rows + other.rows)

    def plain(self) -> LoggedValue:
        """The same with a number in place of a tensor."""
        return self if self.op == METRIC else replace(self, total=float(self.total))

    def number(self) -> float:
        """The value of the phase."""
        return float(self.total) / self.rows if self.op == "mean" else float(self.total)


def _combined(op: str, one: Any, other: Any) -> Any:
    if op == METRIC:
        return one
    if op in ("mean", "sum"):
        return one + other
    is_first = one <= other if op == "min" else one >= other
    return one if is_first else other


@dataclass
class PhaseValues:
    """The rows, the loss and the logged values of a training, or of a validation, in one epoch."""

    rows: int = 0
    loss: LoggedValue | None = None
    logged: dict[str, LoggedValue] = field(default_factory=dict)

    def add(self, name: str, value: LoggedValue) -> None:
        """Count one more value."""
        self.logged[name] = self.logged[name].with_more(value) if name in self.logged else value

    def add_loss(self, loss: Any, rows: int) -> None:
        """Count the loss of a batch."""
        value = LoggedValue("mean", loss * rows, rows)
        self.loss = value if self.loss is None else self.loss.with_more(value)

    def copied(self) -> PhaseValues:
        """A copy, which later values do not change."""
        return PhaseValues(self.rows, self.loss, dict(self.logged))

    def plain(self) -> PhaseValues:
        """The same with numbers in place of tensors."""
        loss = None if self.loss is None else self.loss.plain()
        return PhaseValues(self.rows, loss, {name: value.plain() for name, value in self.logged.items()})


def merged(parts: Iterable[PhaseValues]) -> PhaseValues:
    """The values of all ranks."""
    total = PhaseValues()
    for part in parts:
        total.rows += part.rows
        if part.loss is not None:
            total.loss = part.loss if total.loss is None else total.loss.with_more(part.loss)
        for name, value in part.logged.items():
            total.add(name, value)
    return total


@dataclass(frozen=True)
class PhaseTotals:
    """The same of all ranks, as numbers."""

    rows: int
    loss: float | None
    logged: Mapping[str, float]

    def loss_or(self, *names: str) -> float | None:
        """The loss, or else the first of the logged values ``names`` that is there."""
        if self.loss is not None:
            return self.loss
        return next((self.logged[name] for name in names if name in self.logged), None)


def means_of(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each value over the ranks that have it."""
    names = sorted({name for values in found for name in values})
    return {name: statistics.fmean(values[name] for values in found if name in values) for name in names}


TOGETHER = ("on_train_epoch_end", "on_validation_epoch_end")
"""The hooks of a module that all ranks call at one point, so that values which it logs there can be combined."""


class ValueRecorder:
    """Stands before ``module.log``, and keeps what is logged in steps.

    A value is not combined over ranks when it is logged, because ranks have different numbers of steps, or none. At the
    end of a phase, when all ranks are there, :meth:`exchange` combines all values at once, and logs the results.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._log = module.log
        # That of Lightning: the module may have a method of its own before it, with any arguments.
        base = lightning_base(type(module)) or type(module)
        self._signature = inspect.signature(base.log)
        self._metrics: dict[int, str] = {}
        self._phase: PhaseValues | None = None
        self._rows = 0
        self._is_training = False
        self.between: dict[str, float] = {}
        """The values that were logged outside of steps, as in hooks at the end of an epoch."""
        self.local_hooks: frozenset[str] = frozenset()
        """Hooks that not all ranks call: values are not combined there."""
        self.keeps_metrics = False
        """Whether metrics of the training are reset by :meth:`forget` only."""
        module.log = self.log
        self._held: dict[str, tuple[Any, dict[str, Any]]] | None = None
        for hook in TOGETHER:
            own = getattr(module, hook)
            if getattr(own, "__func__", None) is not getattr(base, hook, None):
                setattr(module, hook, self._combining(own))

    def _combining(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook``, after which all ranks have the mean of each value that it has logged.

        Otherwise schedulers and callbacks of each rank would follow values of its own.
        """

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._held = {}
            try:
                result = hook(*args, **kwargs)
            finally:
                held, self._held = self._held, None
            found = allgather_object({name: float(value) for name, (value, _) in held.items()}, "lightning.between")
            means = means_of(found)
            for name, (_, options) in held.items():
                self._log(name, means[name], **options)
            return result

        return call

    def begin(self, phase: PhaseValues, rows: int, is_training: bool) -> None:
        """A step with a batch of ``rows`` begins."""
        self._phase, self._rows, self._is_training = phase, rows, is_training

    def end(self, loss: Any) -> None:
        """The step has ended; ``loss`` is None where it has none."""
        if self._phase is not None:
            self._phase.rows += self._rows
            if loss is not None and self._rows:
                self._phase.add_loss(loss.detach() if isinstance(loss, torch.Tensor) else loss, self._rows)
        self._phase = None

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As that of the module."""
        given = self._signature.bind(self.module, *args, **kwargs).arguments
        options = {key: value for key, value in given.items() if key not in ("self", "name", "value")}
        name, value = given["name"], given["value"]
        if self._phase is None:
            if self.local_hooks and self.module._current_fx_name in self.local_hooks:
                options["sync_dist"] = False
            if not _is_metric(value):
                self.between[name] = float(value)
                if self._held is not None and not (options.get("sync_dist") or options.get("rank_zero_only")):
                    self._held[name] = value, options
                    return
            self._log(name, value, **options)
            return
        alone = {**options, "sync_dist": False, "sync_dist_group": None}
        if _is_metric(value):
            self._log_metric(self._phase, name, value, alone)
            return
        self._log(name, value, **alone)
        self._phase.add(name, self._logged(value, options))

    def _logged(self, value: Any, options: Mapping[str, Any]) -> LoggedValue:
        reduction = options.get("reduce_fx", "mean")
        op = str(getattr(reduction, "__name__", reduction)).lower()
        op = OTHER_NAMES.get(op, op)
        rows = options.get("batch_size") or self._rows
        number = value.detach().squeeze() if isinstance(value, torch.Tensor) else value
        total = number * rows if op == "mean" else number
        return LoggedValue(op, total, rows, options.get("logger"), *self._has_steps(options))

    def _has_steps(self, options: Mapping[str, Any]) -> tuple[bool, bool]:
        """Whether the user wants the values of steps, and whether also those of epochs."""
        on_step, on_epoch = options.get("on_step"), options.get("on_epoch")
        steps = self._is_training if on_step is None else bool(on_step)
        return steps, steps and (not self._is_training if on_epoch is None else bool(on_epoch))

    def _log_metric(self, phase: PhaseValues, name: str, metric: Any, options: Mapping[str, Any]) -> None:
        """Lightning gets the value of the step only. It would compute that of the epoch where no other rank does."""
        place = options.get("metric_attribute") or self._place_of(metric)
        if place is None:
            raise ValueError(
                f"the metric that is logged as {name!r} is no attribute of the LightningModule; make it one, so that "
                "all workers find it"
            )
        phase.logged[name] = LoggedValue(METRIC, place, 0, options.get("logger"), *self._has_steps(options))
        step = getattr(metric, "_forward_cache", None)
        if self._has_steps(options)[0] and step is not None:
            self._log(name, step, **{**options, "on_step": True, "on_epoch": False, "metric_attribute": None})

    def _place_of(self, metric: Any) -> str | None:
        """The name of ``metric`` in the module, which may have made it in ``setup``; None if it has none."""
        if id(metric) not in self._metrics:
            self._metrics = {id(each): name for name, each in self.module.named_modules() if _is_metric(each)}
        return self._metrics.get(id(metric))

    def exchange(self, phase: PhaseValues) -> PhaseTotals:
        """The values of all ranks, which all call this; they are logged, too, so that callbacks see them."""
        total = merged(allgather_object(phase.plain(), "lightning.values"))
        numbers = {name: self._number(value) for name, value in sorted(total.logged.items())}
        if not self.keeps_metrics:
            self.forget(total)
        for name, number in numbers.items():
            value = total.logged[name]
            shown = {"on_step": False, "on_epoch": True, "logger": value.is_shown}
            self._log(name, number, **shown)
            if value.has_steps:
                self._log(f"{name}_epoch", number, **{**shown, "logger": value.has_both and value.is_shown})
        return PhaseTotals(total.rows, None if total.loss is None else total.loss.number(), numbers)

    def _number(self, value: LoggedValue) -> float:
        if value.op != METRIC:
            return value.number()
        metric = self.module.get_submodule(value.total)
        metric._computed = None  # all ranks compute it together, also those that have done so before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank without rows has not updated it
            return float(metric.compute())

    def forget(self, phase: PhaseValues) -> None:
        """Reset the metrics of torchmetrics in ``phase``."""
        for value in phase.logged.values():
            if value.op == METRIC:
                self.module.get_submodule(value.total).reset()


def _is_metric(value: Any) -> bool:
    """Whether ``value`` is a metric of torchmetrics."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def loss_of(output: Any) -> Any:
    """The loss that a step has returned: a tensor, or a dictionary with one; None if there is none."""
    return output.get("loss") if isinstance(output, Mapping) else output if isinstance(output, torch.Tensor) else None
