"""Fits with Keras on ranks without Spark: shards whose rows are arrays, a model, and the outcome of rank 0."""

import itertools
import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pytest

from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.run import RunFolder
from hvd_cluster.spark.rows.elastic_shard import ElasticShard
from tests.hvd_cluster.keras.pool import Pool as Pool  # its processes shall have TensorFlow before they are forked

BACKENDS = [name for name in ("tensorflow", "torch", "jax") if find_spec(name)]
ON_TORCH = pytest.mark.parametrize("ranks", ["torch"], indirect=True)  # which compiles nothing
NOT_ON_JAX = pytest.mark.parametrize("ranks", [name for name in BACKENDS if name != "jax"], indirect=True)


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request, keras_pools):
    """Two ranks on each backend; this module travels by value."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield keras_pools(request.param)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


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


class ElasticRows(ArrayShard):
    """The rows of a rank of a job whose ranks come and go, as ElasticShard takes them."""

    has_strings = False

    def digest(self):
        return 7

    def widths(self):
        return (1, 1) if self.rows else (0, 0)

    def rest(self, epoch, first):
        return itertools.islice(self, first, None)

    def filler(self, widths, strings):
        return tuple((np.zeros((self.batch_size, 1), "float32"),) for _ in range(2))


def elastic_line(rows, number, **options):
    """As ``line``, the shard with that number."""
    x = np.arange(rows, dtype="float32").reshape(-1, 1) / 10
    return ElasticShard(ElasticRows([x], [2 * x], **options), number)


def line(rows, batch_size=4, first=0, **options):
    """Rows with y = 2 x."""
    x = np.arange(first, first + rows, dtype="float32").reshape(-1, 1) / 10
    return ArrayShard([x], [2 * x], batch_size, **options)


def linear(weight=0.5, **options):
    """y = weight * x; SGD."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[weight]], "float32")])
    return model


def outcome_of(ranks, shards, make=linear, columns=None, run=None, rate=0.1, seed=None, layout=None, **options):
    """The result of rank 0 of a fit of the model that ``make`` makes on ``shards``; the others return nothing."""
    columns = columns or FitColumns(["x"], ["y"])
    folder = run or RunFolder(None, "none")

    def on_rank(shards):
        import keras

        from hvd_cluster.core import basics
        from hvd_cluster.spark.keras.devices import chosen_floats
        from hvd_cluster.spark.keras.layout import KerasLayout
        from hvd_cluster.spark.keras.payload import packed
        from hvd_cluster.spark.keras.training import KerasFit, train

        model = make()
        settings = {name: value() if callable(value) else value for name, value in options.items()}
        settings = {"compiling": {"loss": "mse"}, "verbose": 0, **settings}
        settings.setdefault("optimizer", keras.optimizers.SGD(rate))
        settings["elastic"] = isinstance(shards[0], ElasticShard)
        fit = KerasFit(model, layout=KerasLayout.of(model, columns, **(layout or {})), run=folder, **settings)
        return train(shards[basics.rank()], keras.backend.backend(), chosen_floats(), seed, True, packed(fit))

    outcome, *others = ranks.run(on_rank, shards)
    assert not any(others)
    return outcome


def losses(outcome, part="train"):
    return [record[part]["loss"] for record in outcome["history"]]


def weight_of(outcome):
    return outcome["model"][0].item()


def scripted():
    """Sets the weight at the beginning of each epoch, and writes down what the logs say."""
    import keras

    class Scripted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.set_weights([np.array([[{0: 5.0, 1: 2.0, 2: 7.0}[epoch]]], "float32")])

    return [Scripted()]


def failing():
    """Fails at the beginning of the third epoch."""
    import keras

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("lost")

    return [Fail()]
