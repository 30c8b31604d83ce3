"""Learn handwritten digits in a custom loop of TensorFlow, on one process or on many.

::

    python examples/tensorflow_digits.py
    hvdrun -np 2 python examples/tensorflow_digits.py

The network and the data are those of ``keras_digits.py``. Five lines make the training a distributed one; each is
marked with its number.
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
from keras_digits import BATCH, RATE, Digits, check, model, share

import hvd_cluster.tensorflow as hvd


def train(epochs: int, seed: int) -> keras.Model:
    """Train on every rank; rank 0 prints the result of each epoch."""
    hvd.init()  # 1: find the other ranks
    keras.utils.set_random_seed(seed + hvd.rank())  # ranks start apart, so that line 4 has something to do
    data, network = Digits(seed), model()
    optimizer = keras.optimizers.SGD(RATE * hvd.size(), momentum=0.9)  # 2: each step sees the batches of all ranks
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, network(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # 3: average gradients
        variables = network.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    hvd.broadcast_variables([each.value for each in network.weights], root_rank=0)  # 4: start from the same ones
    count = len(data.training[1]) // (BATCH * hvd.size())  # the same on all ranks
    dataset = tf.data.Dataset.from_tensor_slices(share(data.training)).shuffle(2000, seed=seed).batch(BATCH).take(count)
    for number in range(epochs):
        losses = [step(*batch) for batch in dataset]
        loss = hvd.allreduce(tf.reduce_mean(losses))  # 5: all ranks know how they fare together
        accuracy = evaluate(network, data)
        if hvd.rank() == 0:
            print(f"epoch {number + 1:2}   loss {loss:.4f}   held-out accuracy {accuracy:.4f}", flush=True)
    return network


def evaluate(network: keras.Model, data: Digits) -> float:
    """The share of the held-out images that the network gets right; each rank looks at some of them."""
    images, labels = share(data.held_out)
    right = tf.reduce_sum(tf.cast(tf.argmax(network(images), axis=1) == labels, tf.int32))
    return int(hvd.allreduce(right, op=hvd.Sum)) / len(data.held_out[1])


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits in a custom loop of TensorFlow.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    options = parser.parse_args()
    check(train(options.epochs, options.seed))


if __name__ == "__main__":
    main()
