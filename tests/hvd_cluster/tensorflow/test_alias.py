"""The alias for TensorFlow and Keras: Horovod's modules are ours, and its scripts run unchanged."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import hvd_cluster
import hvd_cluster.keras as of_keras
import hvd_cluster.tensorflow as hvd
import hvd_cluster.tensorflow.keras
from hvd_cluster.keras import elastic
from hvd_cluster.tensorflow.optimizer import aggregation
from tests import startup

ROOT = Path(__file__).parents[3]
HVDRUN = [sys.executable, "-m", "hvd_cluster", "--horovod-alias", "-np", "2", sys.executable]
STAND_IN = f"hvd-cluster {hvd_cluster.__version__}, which stands in for Horovod here, does not have "
aliased = pytest.mark.usefixtures("horovod_alias")

SAME = [
    ("tensorflow", "hvd_cluster.tensorflow"),
    ("tensorflow.compression", "hvd_cluster.tensorflow.compression"),
    ("tensorflow.elastic", "hvd_cluster.tensorflow.elastic"),
    ("tensorflow.functions", "hvd_cluster.tensorflow.functions"),
    ("tensorflow.gradient_aggregation", "hvd_cluster.tensorflow.optimizer.aggregation"),
    ("tensorflow.gradient_aggregation_eager", "hvd_cluster.tensorflow.optimizer.aggregation"),
    ("tensorflow.keras", "hvd_cluster.tensorflow.keras"),
    ("tensorflow.keras.callbacks", "hvd_cluster.tensorflow.keras.callbacks"),
    ("tensorflow.keras.elastic", "hvd_cluster.tensorflow.keras.elastic"),
    ("tensorflow.mpi_ops", "hvd_cluster.tensorflow.mpi_ops"),
    ("tensorflow.sync_batch_norm", "hvd_cluster.keras.sync_batch_norm"),
    ("tensorflow.util", "hvd_cluster.tensorflow.util"),
    ("keras", "hvd_cluster.keras"),
    ("keras.callbacks", "hvd_cluster.keras.callbacks"),
    ("keras.elastic", "hvd_cluster.keras.elastic"),
]


@aliased
@pytest.mark.parametrize(("name", "real"), SAME)
def test_a_module_is_ours_itself(name, real):
    assert importlib.import_module(f"horovod.{name}") is importlib.import_module(real)
    assert importlib.util.find_spec(f"horovod.{name}") is not None


@aliased
def test_names_are_where_horovod_has_them():
    scope = {}
    exec(
        "import horovod.keras\n"
        "import horovod.tensorflow as imported\n"
        "from horovod.tensorflow import SyncBatchNormalization, keras as taken\n"
        "from horovod.tensorflow.mpi_ops import _allreduce, rank_op\n"
        "from horovod.tensorflow.functions import broadcast_variables\n"
        "from horovod.tensorflow.compression import Compression\n"
        "from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper\n"
        "from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager\n"
        "from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization as beside\n",
        scope,
    )
    assert (scope["imported"], scope["taken"]) == (hvd, hvd_cluster.tensorflow.keras)
    assert scope["SyncBatchNormalization"] is scope["beside"] is of_keras.SyncBatchNormalization
    for name in ("rank_op", "broadcast_variables", "Compression"):
        assert scope[name] is getattr(hvd, name)
    for name in ("LocalGradientAggregationHelper", "LocalGradientAggregationHelperEager"):
        assert scope[name] is getattr(aggregation, name)


@aliased
@pytest.mark.parametrize(
    "name",
    [
        "tensorflow.mpi_ops.MPI_LIB",
        "tensorflow.util._make_subgraph",
        "tensorflow.gradient_aggregation.apply_op_to_not_none_tensors",
        "_keras.load_model",
        "_keras.callbacks.BestModelCheckpointImpl",
        "_keras.elastic.KerasState",
    ],
)
def test_a_name_that_we_do_not_have(name):
    module, _, last = f"horovod.{name}".rpartition(".")
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {last}")
    assert str(caught.value) == f"{STAND_IN}horovod.{name}"


@aliased
@pytest.mark.parametrize("name", ["horovod.tensorflow.xla_mpi_ops", "horovod.keras.nothing", "horovod._keras.nothing"])
def test_a_module_that_we_do_not_have(name):
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    assert str(caught.value) == STAND_IN + name


@aliased
def test_variables_as_keys():
    util = importlib.import_module("horovod.tensorflow.util")
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    refs = util.vars_to_refs([first, [second]])
    assert {refs: 3}[util.vars_to_refs([first, [second]])] == 3
    [one, [other]] = util.refs_to_vars(refs)
    assert (one, other) == (first, second)
    assert one is first


@aliased
@pytest.mark.parametrize("there", [True, False])
def test_whether_there_is_a_gpu(monkeypatch, there):
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [kind] * there)
    assert importlib.import_module("horovod.common.util").gpu_available("tensorflow") is there


@aliased
def test_callbacks_with_the_backend_as_their_first_argument():
    impl = importlib.import_module("horovod._keras.callbacks")
    of_elastic = importlib.import_module("horovod._keras.elastic")

    class Own(impl.BroadcastGlobalVariablesCallbackImpl, keras.callbacks.Callback):
        def __init__(self, root_rank):
            super().__init__(keras.backend, root_rank, "")

    assert (Own(1).root_rank, isinstance(Own(1), of_keras.callbacks.BroadcastGlobalVariablesCallback)) == (1, True)
    assert isinstance(impl.MetricAverageCallbackImpl(None), of_keras.callbacks.MetricAverageCallback)
    warmup = impl.LearningRateWarmupCallbackImpl(None, 0.1, warmup_epochs=2)
    assert isinstance(warmup, of_keras.callbacks.LearningRateWarmupCallback)
    schedule = impl.LearningRateScheduleCallbackImpl(None, 0.1, 0.5, 1)
    assert isinstance(schedule, of_keras.callbacks.LearningRateScheduleCallback)
    state = elastic.ObjectState(None, None, batch=0)
    for name in ("CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"):
        callback = getattr(of_elastic, f"{name}Impl")(None, state)
        assert isinstance(callback, getattr(elastic, name))
        assert callback.state is state


@aliased
def test_what_both_packages_for_keras_share():
    shared = importlib.import_module("horovod._keras")
    hvd.init()
    try:
        assert shared.allreduce(keras.backend, 3.0, op=hvd.Sum) == 3
        for values in (
            shared.allgather(None, [1.0, 2.0]),
            shared.broadcast(None, [1.0, 2.0], 0),
            shared.reducescatter(None, [1.0, 2.0]),
        ):
            assert list(values) == [1, 2]
        rest = "distributed", "", "", hvd.Compression.none, False, 1.0, hvd.Average
        optimizer = shared.create_distributed_optimizer(keras, keras.optimizers.SGD(0.5), *rest, groups=1)
        assert isinstance(optimizer, keras.optimizers.SGD)
        with pytest.raises(ValueError, match="give the model"):
            shared.broadcast_global_variables(keras.backend, 0)
    finally:
        hvd.shutdown()


TOLD = """

def told(weights):
    import hashlib
    return hashlib.sha256(b"".join(each.tobytes() for each in weights)).hexdigest()
"""
KERAS = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.random.set_seed(hvd.rank())
numbers = np.random.default_rng(hvd.rank())
images = numbers.normal(size=(64, 8)).astype("float32")
labels = (images.sum(axis=1) > 0).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(64).batch(16)

model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(2)])
scaled_lr = 0.01 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(loss=loss, optimizer=opt, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
fit = model.fit(dataset, steps_per_epoch=8 // hvd.size(), callbacks=callbacks, epochs=10, verbose=0)
if hvd.rank() == 0:
    hvd.load_model("./checkpoint-10.keras")
losses = fit.history["loss"]
print("trained", hvd.size(), losses[-1] < losses[0], losses, told(model.get_weights()))
"""
LOOP = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
tf.random.set_seed(hvd.rank())
numbers = np.random.default_rng(hvd.rank())
images = numbers.normal(size=(64, 8)).astype("float32")
labels = (images.sum(axis=1) > 0).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(64).batch(16)

model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(2)])
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.Adam(0.01 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


losses = []
for batch, (images, labels) in enumerate(dataset.take(80 // hvd.size())):
    losses.append(float(hvd.allreduce(training_step(images, labels, batch == 0))))
if hvd.rank() == 0:
    tf.train.Checkpoint(model=model, optimizer=opt).save("./checkpoints/one")
print("trained", hvd.size(), losses[-1] < losses[0], losses, told(model.get_weights()))
"""


@pytest.mark.parametrize("source", [KERAS, LOOP], ids=["keras", "loop"])
def test_a_script_for_horovod(tmp_path, source):
    script = tmp_path / "train.py"
    script.write_text(TOLD + source)
    variables = {**os.environ, "PYTHONPATH": startup.PATH, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        [*HVDRUN, script], check=False, capture_output=True, text=True, timeout=100, env=variables, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "trained" in line]
    first, second = sorted(lines)
    assert first.startswith("[0]<stdout>:trained 2 True")
    assert second == first.replace("[0]", "[1]")
