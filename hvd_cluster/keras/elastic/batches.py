"""The batches of a GlobalBatches for ``model.fit``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_cluster.elastic.batches import GlobalBatches

__all__ = ["rest_of_epoch"]


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
