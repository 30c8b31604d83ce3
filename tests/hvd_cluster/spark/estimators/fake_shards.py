"""Shards whose rows are tensors, and a model, for the training without Spark."""

import itertools

import torch

from hvd_cluster.spark.rows.elastic_shard import ElasticShard


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


class ElasticRows(FakeShard):
    """The rows of a rank of a job whose ranks come and go, as ElasticShard takes them."""

    has_strings = False

    def digest(self):
        return 7

    def widths(self):
        return (1, 1) if self.rows else (0, 0)

    def rest(self, epoch, first):
        return itertools.islice(FakeShard.torch(self), first, None)

    def torch(self):
        return self

    def filler(self, widths, strings):
        return tuple((torch.zeros(self.batch_size, 1),) for _ in range(2))


def elastic_line(rows, number, first=0, **options):
    """As ``line``, the shard with that number."""
    x = torch.arange(first, first + rows, dtype=torch.float32).reshape(-1, 1) / 10
    return ElasticShard(ElasticRows([x], [2 * x], **options), number)


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
