"""Checkpoints, curves and seeds of Keras, on two ranks and every backend."""

import os
import random

import keras
import numpy as np
import pytest

import hvd_cluster.keras as hvd
from collectives.api import InvalidRequestError
from hvd_cluster.keras.variables import copied
from tests.checks import each_check


def model_of(seed):
    hvd.set_seed(seed, same=True)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    return model


def fit(model, callbacks=(), epochs=1):
    x = np.random.RandomState(hvd.rank()).randn(16, 3).astype("float32")
    return model.fit(x, x.sum(axis=1), batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def values(model):
    return [copied(variable) for variable in (*model.variables, *model.optimizer.variables)]


class Saver(keras.callbacks.Callback):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        hvd.checkpoint.save(self.folder, self.model, step=epoch, metric=-epoch, keep=1, background=True, extra=[epoch])


def check_a_training_goes_on(folder):
    folder = os.path.join(folder, str(hvd.rank()))
    first, second = model_of(1), model_of(2)
    fit(first, [Saver(folder)], epochs=2)
    found = hvd.checkpoint.load(folder, second)
    assert (found.step, found.extra, os.path.basename(found.path)) == (1, [1], "0000002-step-1.keras")
    for model in (first, second):
        fit(model)
    for one, other in zip(values(first), values(second), strict=True):
        np.testing.assert_array_equal(one, other)
    assert hvd.checkpoint.load(folder, second, "best").step == 1


def check_the_file_is_a_model(folder):
    model = model_of(1)
    fit(model)
    hvd.checkpoint.save(folder, model, step=1)
    loaded = hvd.load_model(f"{folder}/0000001-step-1.keras")
    for one, other in zip(values(model), values(loaded), strict=True):
        np.testing.assert_array_equal(one, other)


def check_errors(folder):
    model = model_of(1)
    with pytest.raises(hvd.checkpoint.CheckpointError, match="has no checkpoint"):
        hvd.checkpoint.load(folder, model)
    with pytest.raises(InvalidRequestError, match="has no variables yet"):
        hvd.checkpoint.save(folder, keras.Sequential([keras.layers.Dense(1)]), step=1)
    assert hvd.checkpoint.load(folder, model, missing_ok=True) is None
    hvd.checkpoint.wait()


def check_seeds():
    found = []
    for _ in range(2):
        own = hvd.set_seed(3)
        drawn = [copied(keras.Variable(keras.random.normal((2,)))).tolist(), random.random(), np.random.rand()]
        found.append([own, *drawn])
    assert found[0] == found[1]
    for number in hvd.allgather(np.array([found[0][0], found[0][3]])[None]).T:
        assert number[0] != number[1]


class Writer:
    def __init__(self):
        self.points = []

    def add_scalar(self, *point):
        self.points.append(point)

    def flush(self):
        self.points.append("flush")

    def close(self):
        self.points.append("close")


def check_curves_are_averages():
    writer = Writer()
    model = model_of(1)
    logs = fit(
        model, [hvd.callbacks.MetricLoggerCallback(writer, prefix="train/", samples=1 + 2 * hvd.rank())], epochs=2
    )
    losses = hvd.allgather(np.array(logs.history["loss"])[None])
    means = (losses[0] + 3 * losses[1]) / 4
    assert hvd.metrics.average({"rank": hvd.rank()}) == {"rank": 0.5}
    if hvd.rank():
        assert writer.points == ["close"]
        return
    first, _, second, *rest = writer.points
    assert rest == ["flush", "close"]
    assert [first[::2], second[::2]] == [("train/loss", 0), ("train/loss", 1)]
    np.testing.assert_allclose([first[1], second[1]], means, rtol=1e-6)


@each_check(globals())
def test_on_two_ranks(ranks, check, tmp_path):
    ranks.run(check, *([str(tmp_path)] if check.__code__.co_argcount else []))
