"""Training with Keras in the workers of a cluster, which import this module."""

import os


def train(epochs):
    """On data of this rank's own."""
    import numpy as np

    rank = int(os.environ["HOROVOD_RANK"])
    x = np.random.default_rng(rank).normal(size=(64, 4)).astype("float32")
    return fit(x, x.sum(axis=1, keepdims=True), epochs=epochs, batch_size=16)


def train_on_rows(shard, epochs):
    """On those of a DataFrame that this rank has."""
    return fit(shard.tf_data(), epochs=epochs, shuffle=False)


def fit(*data, **options):
    """The number of ranks, the loss of each epoch, and the weights."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras

    import hvd_cluster.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(*data, **options, callbacks=callbacks, verbose=0).history
    return hvd.size(), history["loss"], [each.tolist() for each in model.get_weights()]


def require_training(results):
    """Both ranks have the same losses and the same weights, and have learned."""
    first, second = results
    assert first == second
    size, losses, _ = first
    assert size == 2
    assert losses[-1] < 0.1 * losses[0]
