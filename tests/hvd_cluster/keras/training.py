"""A small model and its data, the same on every rank and backend."""

import functools

import keras
import numpy as np

import hvd_cluster.keras as hvd
from hvd_cluster.ops.objects import allgather_object

STEPS, ROWS = 6, 4
"""Steps of an epoch, and examples of a rank in each."""


def model(seed=1):
    """Two kernels of more than 128 KB; the other gradients are packed."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(200, "tanh"), keras.layers.Dense(200, "tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


def examples(ranks):
    """The images and labels of ``ranks``, in the order in which they train on them."""
    random = np.random.default_rng(3)
    images = random.normal(size=(STEPS, hvd.size(), ROWS, 6)).astype("f")
    labels = random.integers(0, 3, (STEPS, hvd.size(), ROWS))
    chosen = list(ranks)
    return images[:, chosen].reshape(-1, 6), labels[:, chosen].reshape(-1)


def fit(optimizer, ranks, build=model, epochs=2, **options):
    """The model after training on the examples of ``ranks``."""
    trained = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(optimizer=optimizer, loss=loss, **options)
    trained.fit(*examples(ranks), batch_size=ROWS * len(ranks), epochs=epochs, shuffle=False, verbose=0)
    return trained


def fit_alone(optimizer, **options):
    """One process, for the joined batches."""
    return fit(optimizer, range(hvd.size()), **options)


def sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


@functools.cache
def sgd_alone(**options):
    """The model of :func:`fit_alone` with :func:`sgd`, which each process trains once for all checks."""
    return fit_alone(sgd(**options))


def fit_together(optimizer, **options):
    """This rank's part of them."""
    return fit(optimizer, [hvd.rank()], **options)


def same(trained, wanted, rtol=1e-4, atol=1e-6):
    """The weights of two models; and those of ``trained`` are the same on all ranks, bit by bit."""
    for one, other in zip(trained.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
    identical(trained.get_weights())


def identical(arrays):
    """On all ranks, bit by bit."""
    everyone = allgather_object([np.asarray(array).tobytes() for array in arrays])
    assert all(each == everyone[0] for each in everyone), "the ranks differ"
