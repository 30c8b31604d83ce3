"""Learn handwritten digits with Keras on ranks that come and go.

::

    hvdrun -np 3 --min-np 1 --blacklist-cooldown-range 1 1 python examples/elastic_keras.py
    kill -9 PID                # of a rank that the script has named: the others go on, and another one comes later
    kill PID                   # that rank hands over after its step, and leaves

The network and the data are those of ``keras_digits.py``. Each step has the same images whatever the number of ranks
is, so the result does not depend on who came and went. Five lines make the training elastic; each is marked with its
number.
"""

from __future__ import annotations

import argparse
import os
import time

import keras
from keras_digits import RATE, Digits, check, compiled, model

import hvd_cluster.keras as hvd


@hvd.elastic.run  # 1: called again when the ranks have changed
def train(state: hvd.elastic.KerasState, data: Digits, epochs: int, pause: float) -> None:
    """Train from where ``state`` is; rank 0 prints the result of each epoch."""
    print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()}", flush=True)
    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(pause)),
        hvd.elastic.UpdateBatchStateCallback(state),  # 2: count the step
        hvd.elastic.CommitStateCallback(state),  # 3: this step counts; ranks come and leave here
    ]
    while state.batches.epoch < epochs:
        rest = hvd.elastic.rest_of_epoch(state.batches, *data.training)
        steps, epoch = len(state.batches), state.batches.epoch
        options = {"initial_epoch": epoch, "epochs": epoch + 1, "steps_per_epoch": steps, "shuffle": False}
        state.model.fit(rest, **options, callbacks=callbacks, verbose=0)
        images, labels = (part[hvd.rank() :: hvd.size()] for part in data.held_out)
        results = hvd.evaluate(state.model, images, labels)
        if hvd.rank() == 0:
            accuracy = results["accuracy"]
            print(f"epoch {epoch + 1:2}   ranks {hvd.size()}   held-out accuracy {accuracy:.4f}", flush=True)


def learn(epochs: int, batch_size: int, seed: int, pause: float) -> keras.Model:
    """Runs on every rank; returns the network."""
    hvd.init()
    keras.utils.set_random_seed(seed)
    data = Digits(seed)
    network = compiled(model(), hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9)))
    batches = hvd.elastic.GlobalBatches(data.training[1], batch_size, seed=seed)  # 4: by all ranks together
    state = hvd.elastic.KerasState(network, batches=batches)  # 5: it survives a change
    train(state, data, epochs, pause)
    return network


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with Keras on ranks that come and go.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to kill ranks")
    options = parser.parse_args()
    check(learn(options.epochs, options.batch_size, options.seed, options.pause))


if __name__ == "__main__":
    main()
