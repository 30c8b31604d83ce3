"""The training that the tests of whole jobs run: ``elastic_training.py FOLDER WAY``, on the backend of Keras.

WAY is fit, compiled (by XLA) or loop. A worker whose name is in ``FOLDER/die`` kills itself in its next step, when it
has submitted gradients.

Each worker appends to ``FOLDER/<worker>`` what happens to it; it trains until ``FOLDER/end`` exists. See
tests/hvd_cluster/elastic/jobs.py. The last note but one has a digest of all variables; a worker fails if they are not
those that NumPy finds for the same number of steps on one process.
"""

import hashlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path

warnings.simplefilter("error")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import hvd_cluster.keras as hvd  # noqa: E402
from collectives.events import Submitted  # noqa: E402
from hvd_cluster.core import basics  # noqa: E402
from hvd_cluster.keras.variables import copied  # noqa: E402
from hvd_cluster.ops.objects import allgather_object  # noqa: E402

ROWS, FEATURES, BATCH, MOMENTUM = 96, 5, 8, 0.875
RATE = 1 / 64  # Keras rounds it, and the momentum, to float32
STEP_SECONDS = 0.005


def data():
    random = np.random.RandomState(3)
    x = random.randn(ROWS, FEATURES)
    return rounded(x), rounded(x @ random.randn(FEATURES, 1) + 0.1 * random.randn(ROWS, 1))


def rounded(numbers):
    """To what float32 can hold: Keras may convert data."""
    return np.round(numbers * 256) / 256


def build(jit_compile):
    layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="ones")]
    model = keras.Sequential(layers)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=MOMENTUM))
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    return model


def alone(batches, steps):
    """Kernel and bias after ``steps`` on one process."""
    x, y = data()
    weights, speed = np.array([1.0] * FEATURES + [0.0])[:, None], 0.0
    rows = np.hstack([x, np.ones((ROWS, 1))])
    for step in range(steps):
        batches.epoch, batches.step = divmod(step, batches.steps_per_epoch)
        chosen = batches.samples(batches.step)
        gradient = 2 * rows[chosen].T @ (rows[chosen] @ weights - y[chosen]) / len(chosen)
        speed = MOMENTUM * speed - RATE * gradient
        weights = weights + speed
    return weights


def _kill_this_process(event):
    if isinstance(event, Submitted) and "gradient" in event.name:
        os.kill(os.getpid(), signal.SIGKILL)


class Notes(keras.callbacks.Callback):
    """Writes what happens, and ends the training on all ranks at once."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.worker = os.environ.get("HOROVOD_WORKER_ID", "worker-0")
        self.is_over = False
        self.note(f"pid {os.getpid()}")

    def note(self, text):
        with (self.folder / self.worker).open("a") as file:
            file.write(f"{text}\n")

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(STEP_SECONDS)
        self.is_over = any(allgather_object((self.folder / "end").exists(), "end"))
        self.model.stop_training = self.is_over
        self._die_if_wanted()

    def _die_if_wanted(self):
        wanted = self.folder / "die"
        if wanted.exists() and wanted.read_text() == self.worker:
            basics.engine().events.subscribe(_kill_this_process)

    def on_train_batch_end(self, batch, logs=None):
        self.note(f"step {batch} {hvd.size()}")


def fit(state, notes):
    x, y = data()
    callbacks = [notes, hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state)]
    while not notes.is_over:
        rows = hvd.elastic.rest_of_epoch(state.batches, x, y)
        steps = len(state.batches)
        state.model.fit(rows, steps_per_epoch=steps, shuffle=False, callbacks=callbacks, verbose=0)


def loop(state, notes):
    """A custom loop with a function that is traced once, in all worlds."""
    import tensorflow as tf

    x, y = data()
    notes.set_model(state.model)

    @tf.function(reduce_retracing=True)
    def train_step(rows, wanted, weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((state.model(rows) - wanted) ** 2) * weight
        state.optimizer.apply(tape.gradient(loss, state.model.trainable_variables))

    while not notes.is_over:
        for indices in state.batches:
            notes.on_train_batch_begin(state.batches.step)
            train_step(tf.constant(x[indices]), tf.constant(y[indices]), tf.constant(state.batches.weight, tf.float64))
            notes.on_train_batch_end(state.batches.step)
            state.batches.advance()
            state.steps += 1
            state.commit()
            if notes.is_over:
                break


def main():
    keras.backend.set_floatx("float64")
    notes, way = Notes(Path(sys.argv[1])), {"fit": fit, "compiled": fit, "loop": loop}[sys.argv[2]]
    hvd.init()
    model = build(jit_compile=True if sys.argv[2] == "compiled" else "auto")
    batches = hvd.elastic.GlobalBatches(range(ROWS), BATCH)
    state = hvd.elastic.KerasState(model, batches=batches, steps=0)

    @hvd.elastic.run
    def train(state):
        notes.note(f"world {hvd.rank()} of {hvd.size()}")
        way(state, notes)

    train(state)
    done = batches.epoch * batches.steps_per_epoch + batches.step
    iterations = int(copied(model.optimizer.iterations))
    found = [copied(each) for each in model.trainable_variables]
    # On torch Keras computes a part in float32. A step more or less would change the fourth digit.
    tolerance = 1e-6 if keras.backend.backend() == "torch" else 1e-9
    np.testing.assert_allclose(np.vstack([found[0], found[1][None]]), alone(batches, done), tolerance, tolerance)
    everything = [*found, *(copied(each) for each in model.optimizer.variables)]
    notes.note(hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in everything)).hexdigest())
    notes.note(f"result {done} {iterations} {hvd.rank()} {hvd.size()}")


if __name__ == "__main__":
    main()
