"""Keras itself with a distributed optimizer: XLA on TensorFlow, nothing else imported, the five lines."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import hvd_cluster.keras as hvd
from hvd_cluster.core import basics
from tests.checks import each_check
from tests.hvd_cluster.keras.training import fit_together, model

SCRIPT = """
import keras
import hvd_cluster.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
inputs = keras.random.normal((32, 4), seed=hvd.rank())
model.fit(inputs, inputs[:, :2], epochs=2, verbose=0)
print("sum", float(sum(abs(weight).sum() for weight in model.get_weights())))
"""
IMPORTS = """
import sys
import keras

others = {"tensorflow", "torch", "jax"}
before = others & set(sys.modules)
import hvd_cluster.keras

print(sorted(others & set(sys.modules) - before))
"""


def check_models_that_xla_compiles():
    if keras.backend.backend() != "tensorflow":
        return
    trained = fit_together(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True, epochs=1)
    assert trained.jit_compile is True
    plain = fit_together(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=False, epochs=1)
    for one, other in zip(trained.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def check_models_are_not_compiled_where_that_is_not_wanted():
    if keras.backend.backend() != "tensorflow":
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basics._process, "allows_xla", False)
        with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
            trained = fit_together(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True, epochs=1)
        assert trained.jit_compile is False
        plain = model()
        plain.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        assert plain.jit_compile is True


def check_auto_is_no_where_keras_would_compile():
    """Keras compiles on machines with a GPU."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    with pytest.MonkeyPatch.context() as patch:
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        patch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
        plain, ours, scaled = model(), model(), model()
        plain.compile(keras.optimizers.SGD(0.1), "mse")
        ours.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        scaled.compile(keras.optimizers.LossScaleOptimizer(wrapped), "mse")
        assert [each.jit_compile for each in (plain, ours, scaled)] == [True, False, False]


def check_a_step_with_a_tape_that_keras_compiles():
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    from hvd_cluster.tensorflow import DistributedGradientTape

    class Model(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0]))
            variables = self.trainable_variables
            self.optimizer.apply(DistributedGradientTape(tape).gradient(loss, variables), variables)
            return {"loss": loss}

    trained = Model([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basics._process, "allows_xla", False)
        trained.compile(keras.optimizers.SGD(0.1), jit_compile=True)
        with pytest.raises(NotImplementedError, match=r"give compile\(\) jit_compile=False"):
            trained.fit(tf.ones([8, 4]), tf.ones([8, 1]), verbose=0)
    for jit_compile in (True, False):
        trained.compile(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
        trained.fit(tf.ones([8, 4]), tf.ones([8, 1]), verbose=0)


@each_check(globals())
def test_keras(ranks, check):
    ranks.run(check)


def environment(backend):
    return {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def output(backend, *command):
    done = subprocess.run(command, env=environment(backend), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_other_framework_is_imported(backend):
    assert output(backend, sys.executable, "-c", IMPORTS) == "[]\n"


def test_the_five_lines(backend, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    lines = output(backend, sys.executable, "-m", "hvd_cluster", "-np", "2", sys.executable, str(script)).splitlines()
    sums = {line.partition("sum ")[2] for line in lines if "sum " in line}
    assert len(sums) == 1
    assert len([line for line in lines if "sum " in line]) == 2
