"""A trained model predicts where this package cannot be imported."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import hvd_cluster

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")

ALONE = """
import json
import sys

for name in ("hvd_cluster", "executors", "collectives"):
    sys.modules[name] = None  # importing it is an error

import keras
import numpy as np
import tensorflow as tf

x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
saved = keras.models.load_model("model.keras")
served = tf.saved_model.load("exported")
nodes = {node.op for node in served.signatures["serving_default"].graph.as_graph_def().node}
print(json.dumps({
    "keras": saved.predict(x, verbose=0).tolist(),
    "exported": served.serve(x).numpy().tolist(),
    "optimizer": f"{type(saved.optimizer).__module__}.{type(saved.optimizer).__name__}",
    "ours": [name for name in nodes if name.startswith("Horovod")],
}))
"""


def train(folder):
    """Train on two ranks; rank 0 saves the model in both formats. The predictions."""
    import keras
    import numpy as np

    import hvd_cluster.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, x[:, :2], batch_size=16, epochs=2, callbacks=callbacks, verbose=0)
    if hvd.rank() == 0:
        model.save(f"{folder}/model.keras")
        model.export(f"{folder}/exported", verbose=False)
    return model.predict(np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4), verbose=0).tolist()


def test_without_this_package(tmp_path):
    environment = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    expected, _ = hvd_cluster.run(train, (str(tmp_path),), num_proc=2, env=environment)
    command = [sys.executable, "-I", "-c", ALONE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for kind in ("keras", "exported"):
        np.testing.assert_allclose(found[kind], expected, rtol=1e-5, atol=1e-6)
    assert found["optimizer"] == "keras.src.optimizers.sgd.SGD"
    assert found["ours"] == []
