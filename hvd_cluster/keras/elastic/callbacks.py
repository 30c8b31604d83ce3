"""What ``model.fit`` does for an elastic state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from collectives import InvalidRequestError
from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.state import ObjectState

__all__ = ["CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "rest_of_epoch"]


def rest_of_epoch(
    batches: GlobalBatches, x: Any, y: Any
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.float32]]]:
    """The samples of this rank in the rest of an epoch, for one epoch of ``model.fit``::

        while batches.epoch < 10:
            data = hvd.elastic.rest_of_epoch(batches, images, labels)
            epochs = {"initial_epoch": batches.epoch, "epochs": batches.epoch + 1}
            model.fit(data, **epochs, steps_per_epoch=len(batches), shuffle=False, callbacks=callbacks)

    ``x`` and ``y`` are arrays of all samples, which have one row each. Yields (rows of x, rows of y, weights): the
    weights, float32 of shape (rows,), make the average of the ranks' gradients that of the whole batch, see
    :meth:`GlobalBatches.weigh`. It is for the ranks of the moment when it is made: make another one when they change.
    """
    for step, indices in zip(range(batches.step, batches.steps_per_epoch), batches, strict=True):
        rows = np.asarray(indices)
        yield x[rows], y[rows], np.full(len(rows), batches.weight_of(step), np.float32)


class _Executions:
    """Counts the batches of an epoch: with ``steps_per_execution`` Keras tells of the last one of several only."""

    def __init__(self) -> None:
        self.done = 0
        self._steps: int | None = None

    def begin(self, steps: int | None = None) -> None:
        """An epoch begins, which has so many batches; None if that is not known."""
        self.done, self._steps = 0, steps

    def batches_of(self, last: int) -> int:
        """The number of batches of the execution that has just ended; Keras says that ``last`` was its last one.

        The last execution of an epoch may have fewer than Keras says.
        """
        before, self.done = self.done, last + 1 if self._steps is None else min(last + 1, self._steps)
        return self.done - before


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits ``state`` after every ``batches_per_commit`` batches, and at the end of an epoch.

    Give it as the last callback: others that change the state come before. With ``steps_per_execution`` it commits
    after the execution in which the number is reached. InvalidRequestError for anything but an integer of at least 1.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        if isinstance(batches_per_commit, bool) or not isinstance(batches_per_commit, int) or batches_per_commit < 1:
            raise InvalidRequestError(f"batches_per_commit={batches_per_commit!r} must be an integer of at least 1")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit
        self._executions = _Executions()

    def on_train_begin(self, logs: Any = None) -> None:
        """All ranks count from here, newcomers, too."""
        self.batches_remaining = self.batches_per_commit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras counts the batches of an epoch."""
        self._executions.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, perhaps."""
        self.batches_remaining -= self._executions.batches_of(batch)
        if self.batches_remaining <= 0:
            self.batches_remaining = self.batches_per_commit - -self.batches_remaining % self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.batch``, the number of batches done in the epoch: a call of ``fit`` that begins with 5 in it counts
    on from there, and its progress bar has 5 batches less. Give it the rest of the data then, such as
    ``dataset.skip(state.batch)``.

    Where the state has a GlobalBatches, its place moves on instead, or as well.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0
        self._steps: int | None = None
        self._executions = _Executions()

    def on_train_begin(self, logs: Any = None) -> None:
        """An epoch goes on, perhaps."""
        self._done_before = getattr(self.state, "batch", 0)
        self._steps = self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The rest of an epoch has fewer steps."""
        if self._steps is not None:
            self.params["steps"] = self._steps - self._done_before
        self._executions.begin(self._steps)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch, or those of an execution."""
        done = self._executions.batches_of(batch)
        if hasattr(self.state, "batch"):
            self.state.batch = self._done_before + self._executions.done
        for value in vars(self.state).values():
            if isinstance(value, GlobalBatches):
                for _ in range(done):
                    value.advance()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with its first batch."""
        self._done_before = 0
        if hasattr(self.state, "batch"):
            self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.epoch``, the number of whole epochs of the whole training. A call of ``fit`` may count its epochs
    from 0, or from ``initial_epoch=state.epoch``.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self.state = state
        self._offset: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """The first epoch will tell how this call of ``fit`` counts."""
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compare the counts."""
        if self._offset is None:
            self._offset = self._state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """One more epoch is done."""
        self._state.epoch = epoch + 1 + (self._offset or 0)

    @property
    def _state(self) -> Any:
        return self.state
