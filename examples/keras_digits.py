"""Learn handwritten digits with Keras, on one process or on many.

::

    python examples/keras_digits.py
    hvdrun -np 2 python examples/keras_digits.py
    KERAS_BACKEND=torch hvdrun -np 2 python examples/keras_digits.py     # or jax

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships. Five lines make the training a distributed one;
each is marked with its number.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvd_cluster.keras as hvd

HELD_OUT = 360
RATE = 0.03
BATCH = 32


class Digits:
    """The images as a training and a held-out part, the same on every rank."""

    def __init__(self, seed: int) -> None:
        bunch = load_digits()
        order = np.random.RandomState(seed).permutation(len(bunch.target))
        images = bunch.images[order].astype("float32")[..., None] / 16
        labels = bunch.target[order]
        self.held_out = images[:HELD_OUT], labels[:HELD_OUT]
        self.training = images[HELD_OUT:], labels[HELD_OUT:]


def model() -> keras.Model:
    """A small convolutional network."""
    layers = [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


def compiled(network: keras.Model, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """``network``, ready to be trained."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer, loss=loss, metrics=["accuracy"])
    return network


def train(epochs: int, seed: int) -> keras.Model:
    """Train on every rank; rank 0 prints the result of each epoch."""
    hvd.init()  # 1: find the other ranks
    keras.utils.set_random_seed(seed + hvd.rank())  # ranks start apart, so that line 4 has something to do
    data = Digits(seed)
    optimizer = keras.optimizers.SGD(RATE * hvd.size(), momentum=0.9)  # 2: each step sees the batches of all ranks
    network = compiled(model(), hvd.DistributedOptimizer(optimizer))  # 3: average gradients
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # 4: start from the same variables
        hvd.callbacks.EvaluateCallback(*share(data.held_out)),  # 5: all ranks validate, each on its part
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=report))
    images, labels = share(data.training)
    steps = len(data.training[1]) // (BATCH * hvd.size())  # the same on all ranks
    images, labels = images[: steps * BATCH], labels[: steps * BATCH]
    network.fit(images, labels, batch_size=BATCH, epochs=epochs, callbacks=callbacks, verbose=0)
    return network


def share(part: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """This rank's images and labels."""
    images, labels = part
    return images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]


def report(epoch: int, logs: dict[str, float]) -> None:
    """Print the result of an epoch."""
    line = f"epoch {epoch + 1:2}   loss {logs['loss']:.4f}   held-out accuracy {logs['val_accuracy']:.4f}"
    print(line, flush=True)


def fingerprint(network: keras.Model) -> str:
    """The same for two networks only if every bit of their parameters is the same."""
    weights = network.get_weights()
    return hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in weights)).hexdigest()[:16]


def check(network: keras.Model) -> None:
    """Say that all ranks have the same parameters; end the program where they differ."""
    own = np.frombuffer(fingerprint(network).encode(), np.uint8)
    found = [bytes(row).decode() for row in hvd.allgather(own[None])]
    if len(set(found)) > 1:
        sys.exit(f"the ranks ended with different parameters: {', '.join(found)}")
    if hvd.rank() == 0:
        count = len(found)
        print(f"parameters: bit for bit the same on {count} of {count} ranks, sha256 {found[0]}", flush=True)


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with Keras, on one process or on many.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    options = parser.parse_args()
    check(train(options.epochs, options.seed))


if __name__ == "__main__":
    main()
