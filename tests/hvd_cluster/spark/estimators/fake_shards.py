"""Shards whose rows are tensors, and a model, for the training without Spark."""

import torch


class FakeShard:
    """Batches of ``features`` and ``labels``, lists of tensors, and perhaps of ``weights``."""

    def __init__(self, features, labels, batch_size=4, weights=None, validation=None):
        self._sides = features, labels, weights
        self.batch_size = batch_size
        self.validation = validation

    @property
    def rows(self):
        return len(self._sides[0][0])

    def torch(self):
        features, labels, weights = self._sides
        for first in range(0, self.rows, self.batch_size):
            rows = slice(first, first + self.batch_size)
            batch = tuple(each[rows] for each in features), tuple(each[rows] for each in labels)
            yield batch if weights is None else (*batch, weights[rows])

    def batched(self, size):
        return FakeShard(self._sides[0], self._sides[1], size, self._sides[2])


def line(rows, batch_size=4, first=0, validation=None, weights=None):
    """Rows with y = 2 x."""
    x = torch.arange(first, first + rows, dtype=torch.float32).reshape(-1, 1) / 10
    return FakeShard([x], [2 * x], batch_size, weights, validation)


def same(one, other):
    """Whether nested states are equal, to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class TwoHeads(torch.nn.Module):
    """Two inputs, two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 1), torch.nn.Linear(1, 3)

    def forward(self, pair, single):
        return self.first(pair), self.second(single)
