"""Shards whose rows are arrays, for the training with Keras without Spark."""

import numpy as np


class ArrayShard:
    """Batches of ``features`` and ``labels``, lists of arrays, and perhaps of ``weights``."""

    def __init__(self, features, labels, batch_size=4, weights=None, validation=None):
        self._sides = features, labels, weights
        self.batch_size = batch_size
        self.validation = validation

    @property
    def rows(self):
        return len(self._sides[0][0])

    def __iter__(self):
        features, labels, weights = self._sides
        for first in range(0, self.rows, self.batch_size):
            rows = slice(first, first + self.batch_size)
            batch = tuple(each[rows] for each in features), tuple(each[rows] for each in labels)
            yield batch if weights is None else (*batch, weights[rows])

    def batched(self, size):
        return ArrayShard(self._sides[0], self._sides[1], size, self._sides[2])


def line(rows, batch_size=4, first=0, **options):
    """Rows with y = 2 x."""
    x = np.arange(first, first + rows, dtype="float32").reshape(-1, 1) / 10
    return ArrayShard([x], [2 * x], batch_size, **options)
