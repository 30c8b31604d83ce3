"""A run: its settings on their way to the workers, its folder in a store, and how a later fit goes on from there."""

from __future__ import annotations

import hashlib
import json
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from types import CellType, CodeType
from typing import Any, TypeVar

import numpy as np

from hvd_cluster.spark.estimators.store import Store

__all__ = ["EpochRange", "FitSettings", "RunFolder", "parameter", "unreadable", "with_widths"]

T = TypeVar("T")

PARAMETER = "parameter"
MEASURING = (
    "loss",
    "loss_constructors",
    "loss_weights",
    "label_cols",
    "sample_weight_col",
    "validation",
    "checkpoint_callback",
)
"""The parameters that decide what the loss of a validation is."""
DEEPEST = 4


def with_widths(shard: Any, train: Callable[..., T], *arguments: Any) -> tuple[T, tuple[int, ...]]:
    """The outcome of ``train`` on this rank, and how many values its rows have in each input; nothing without rows."""
    return train(shard, *arguments), shard.feature_widths()


def parameter(name: str) -> Mapping[str, str]:
    """The metadata of a field of :class:`FitSettings` that gets the value of the parameter ``name``."""
    return {PARAMETER: name}


@dataclass(kw_only=True)
class FitSettings:
    """The settings that estimators of all frameworks have.

    A subclass adds those of its framework, and the model. Nothing in it needs Spark.

    Args:
        epochs: how many more epochs to train.
        train_steps: the most batches of a rank in an epoch; None: all.
        validation_steps: the same for validation.
        validation_batch_size: the rows of a batch for validation; None: as in training.
        callbacks: those of the user, in the classes of the framework.
        compression: how gradients travel; None: as they are.
        terminate_on_nan: whether a loss that is no finite number ends the fit.
        verbose: whether there is progress, and how much of it.
        measure: what the loss of a validation is, by the parameters: the best epochs of two fits can be compared only
            where it is the same.
    """

    epochs: int = field(default=1, metadata=parameter("epochs"))
    train_steps: int | None = field(default=None, metadata=parameter("train_steps_per_epoch"))
    validation_steps: int | None = field(default=None, metadata=parameter("validation_steps_per_epoch"))
    validation_batch_size: int | None = field(default=None, metadata=parameter("val_batch_size"))
    callbacks: Sequence[Any] = field(default=(), metadata=parameter("callbacks"))
    compression: Any = field(default=None, metadata=parameter("gradient_compression"))
    terminate_on_nan: bool = field(default=False, metadata=parameter("terminate_on_nan"))
    verbose: int = field(default=1, metadata=parameter("verbose"))
    measure: str = ""

    @classmethod
    def chosen(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of this class that come from ``settings``, the values of all parameters by name."""
        found = {each.name: settings[each.metadata[PARAMETER]] for each in fields(cls) if PARAMETER in each.metadata}
        measure = fingerprint({name: settings.get(name) for name in MEASURING})
        return {**found, "measure": hashlib.sha256(measure.encode()).hexdigest()}

    def validation_shard(self, kept_apart: Any) -> Any:
        """The shard ``kept_apart`` in batches of the size for validation."""
        size = self.validation_batch_size
        return kept_apart if size is None else kept_apart.batched(size)


def fingerprint(value: Any, depth: int = 0) -> str:
    """A text of ``value`` that is the same in another process. A function is known by its code, an object by its parts.

    What lies deeper than DEEPEST is known by its class.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if depth > DEEPEST:
        return kind
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key}: {fingerprint(each, depth + 1)}' for key, each in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(fingerprint(each, depth + 1) for each in value)}]"
    if isinstance(value, partial):
        return f"partial{fingerprint([value.func, value.args, value.keywords], depth + 1)}"
    if isinstance(code := getattr(value, "__code__", None), CodeType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        names = fingerprint([*code.co_names, *code.co_varnames], depth + 1)
        parts = fingerprint([each for each in code.co_consts if not hasattr(each, "co_code")], depth + 1)
        return f"{value.__qualname__}({code.co_code.hex()}, {names}, {parts}, {fingerprint(cells, depth + 1)})"
    if hasattr(value, "__array__"):
        return f"{kind}({_numbers(value)})"
    kind += f".{getattr(value, '__qualname__', '')}"  # of a function without code in Python
    return f"{kind}{fingerprint(getattr(value, '__dict__', {}), depth + 1)}"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the function may be called before the variable has a value
        return None


def _numbers(value: Any) -> Any:
    """Those of an array or a tensor; None for a type that NumPy does not have."""
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value).tolist()
    except (TypeError, RuntimeError):
        return None


_under_way: set[str] = set()
"""The folders of runs of which this process has a fit."""
_changing = threading.Lock()  # held by a thread of the driver while it changes them, for no longer


@dataclass(frozen=True)
class RunFolder:
    """The folder of the run ``run_id`` in ``store``; without one nothing is written. Workers get a copy."""

    store: Store | None
    run_id: str

    @classmethod
    def of(cls, store: Store | None, run_id: str | None, prefix: str) -> RunFolder:
        """``run_id`` None means a new name after the time. Raises ValueError for a run_id without a store."""
        if run_id is not None and store is None:
            raise ValueError(
                f"run_id is {run_id!r}, but there is no store, which would keep its checkpoint; give store=, as with "
                "Store.create(path)"
            )
        keeps_runs = store is not None and store.saving_runs()
        return cls(store if keeps_runs else None, run_id or f"{prefix}_{time.time_ns()}")

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises ValueError where another thread is inside with the same folder: both would go on from one another."""
        folder = "" if self.store is None else self.store.get_run_path(self.run_id)
        with _changing:
            if folder in _under_way:
                raise ValueError(
                    f"run_id is {self.run_id!r}, and another fit of this process has that run under way; give each fit "
                    "a run_id of its own, or call fit when the other one has ended"
                )
            _under_way.update([folder] if folder else ())
        try:
            yield
        finally:
            with _changing:
                _under_way.discard(folder)

    def check_writable(self, about: Mapping[str, Any]) -> None:
        """Write what a fit is ``about`` into the folder. Raises ValueError where that is impossible."""
        if self.store is None:
            return
        path = posixpath.join(self.store.get_run_path(self.run_id), "fit.json")
        try:
            self.store.write_bytes(path, json.dumps(about, default=str).encode())
        except Exception as error:
            raise ValueError(
                f"the store cannot be written: {path}: {error.__cause__ or error}; give a store= whose folder the "
                "driver and the workers can write"
            ) from error

    def read(self) -> bytes | None:
        """The checkpoint; None if there is none."""
        path = self.store.get_checkpoint_path(self.run_id) if self.store is not None else None
        if self.store is None or path is None or not self.store.exists(path):
            return None
        return self.store.read(path)

    def of_another(self, reason: object) -> ValueError:
        """The error for a checkpoint that does not fit the model or the optimizer, for that ``reason``."""
        return ValueError(
            f"run_id is {self.run_id!r}, but the checkpoint of that run is of another model or optimizer: {reason}; "
            "give another run_id, or the model and the optimizer of that run"
        )

    def write(self, checkpoint: bytes, history: Sequence[Mapping[str, Any]]) -> None:
        """Replace the checkpoint, and the file of the history."""
        if self.store is None:
            return
        path, logs = self.store.get_checkpoint_path(self.run_id), self.store.get_logs_path(self.run_id)
        if path is not None and logs is not None:
            self.store.write_bytes(path, checkpoint)
            text = json.dumps(list(history), default=str)
            self.store.write_bytes(posixpath.join(logs, "history.json"), text.encode())


def unreadable(estimator: str, error: Exception | str = "") -> ValueError:
    """The error for a checkpoint that an ``estimator`` cannot read."""
    why = f": {error}" if str(error) else ""
    return ValueError(
        f"the checkpoint of the run is damaged, or was not written by a {estimator}{why}; remove it, or give another "
        "run_id"
    )


@dataclass(frozen=True)
class EpochRange:
    """The epochs of a fit, of all that the run has had: from ``first`` up to, and without, ``end``."""

    first: int
    end: int

    @classmethod
    def of(cls, epochs: int, done: int = 0, earlier: tuple[int, int] | None = None) -> EpochRange:
        """``done`` epochs are in the checkpoint of an ``earlier`` fit, which had these epochs.

        If that fit failed, this one does what is left of ``epochs``. If it was complete, this one adds ``epochs``.
        """
        begin = done if earlier is None or done >= earlier[1] else earlier[0]
        return cls(begin, max(begin + epochs, done))
