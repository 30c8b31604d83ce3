"""Elastic training with Keras in the style of Horovod's example for TensorFlow: ``horovod_elastic.py FOLDER``.

Its callback trains for a step, which Horovod needs for the optimizer of a newcomer. It notes what happens as
elastic_training.py does.
"""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

RATE, STEP_SECONDS = 0.001, 0.01

folder = Path(sys.argv[1])


def note(text):
    with (folder / os.environ["HOROVOD_WORKER_ID"]).open("a") as file:
        file.write(f"{text}\n")


note(f"pid {os.getpid()}")
hvd.init()
random = np.random.RandomState(0)
rows = random.randn(64, 4).astype("float32"), (np.arange(64) % 3).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices(rows).repeat().shuffle(64).batch(4)

model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dropout(0.25)])
model.add(tf.keras.layers.Dense(3, activation="softmax"))
optimizer = hvd.DistributedOptimizer(
    tf.keras.optimizers.Adam(RATE * hvd.size()), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])
model.fit(dataset, steps_per_epoch=1, epochs=1, shuffle=False, verbose=0)
state = hvd.elastic.KerasState(model, batch=0, epoch=0, steps=1)


class Death(tf.keras.callbacks.Callback):
    """Of the worker in the file ``die``, while the others wait for its gradients."""

    def on_train_batch_begin(self, batch, logs=None):
        file = folder / "die"
        if file.exists() and file.read_text() == os.environ["HOROVOD_WORKER_ID"]:
            os.kill(os.getpid(), signal.SIGKILL)


def on_state_reset():
    state.model.optimizer.learning_rate = RATE * hvd.size()
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, shuffle=False, verbose=0, callbacks=[Death()])
    state.steps += 1
    note(f"reset {hvd.size()}")


class Notes(tf.keras.callbacks.Callback):
    """Ends the training on all ranks at once."""

    is_over = False

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(STEP_SECONDS)
        self.is_over = hvd.allreduce(float((folder / "end").exists()), name="end") > 0
        self.model.stop_training = self.is_over

    def on_train_batch_end(self, batch, logs=None):
        state.steps += 1
        note(f"step {batch} {hvd.size()}")


notes = Notes()
callbacks = [notes, hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state)]
callbacks.append(hvd.elastic.CommitStateCallback(state))


@hvd.elastic.run
def train(state):
    note(f"world {hvd.rank()} of {hvd.size()}")
    while not notes.is_over:
        options = {"steps_per_epoch": 60 // hvd.size(), "callbacks": callbacks, "shuffle": False, "verbose": 0}
        state.model.fit(dataset, epochs=state.epoch + 1, initial_epoch=state.epoch, **options)


state.register_reset_callbacks([on_state_reset])
train(state)
weights = np.concatenate([each.ravel() for each in model.get_weights()])
assert (hvd.broadcast(weights, root_rank=0, name="weights") == weights).all()
assert float(model.optimizer.learning_rate) == np.float32(RATE * hvd.size())
note(f"result {int(model.optimizer.iterations)} {state.steps} {hvd.rank()} {hvd.size()}")
