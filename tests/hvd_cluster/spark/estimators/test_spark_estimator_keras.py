"""A KerasEstimator on a real cluster of two executors, on the backend of this process."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql import functions as F
from spark_cluster import CONNECT_SECONDS
from spark_training import wait_at_gate, with_a_killed_executor

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

import keras

from hvd_cluster.core import basics
from hvd_cluster.spark.estimators.backend import Backend
from hvd_cluster.spark.estimators.store import Store
from hvd_cluster.spark.keras import KerasEstimator, KerasModel

# Spark keeps its own processes and connections, and TensorFlow its threads.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes", "environment", "threads"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras with NumPy 2
]


class Doubled(keras.layers.Layer):
    """A layer of this module, which the workers cannot import."""

    def call(self, inputs):
        return inputs * 2


def two_heads():
    triple, single = keras.Input((3,), name="v"), keras.Input((1,), name="c")
    first = keras.layers.Dense(1, name="y")(Doubled()(triple))
    second = keras.layers.Lambda(lambda scores: keras.ops.softmax(scores * 2), name="kind")(
        keras.layers.Dense(2)(single)
    )
    return keras.Model([triple, single], [first, second])


def table(spark, rows=240):
    found = []
    for number in range(rows):
        a, b, c = (math.sin(number * factor) for factor in (1.1, 2.3, 3.7))
        vector = Vectors.dense(a, b, 0.0) if number % 2 else Vectors.sparse(3, [0, 1], [a, b])
        found.append((vector, c, a - b, int(c > 0), 1.0 + number % 2, 0.5 if number % 4 == 0 else 0.0))
    return spark.createDataFrame(found, ["v", "c", "y", "kind", "w", "held_out"])


class Backends(keras.callbacks.Callback):
    """Ends the fit where a worker has another backend than the driver."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def on_train_begin(self, logs=None):
        assert keras.backend.backend() == self.name


def estimator_of(model, **options):
    return KerasEstimator(
        **{
            "num_proc": 2,
            "verbose": 0,
            "model": model,
            "optimizer": keras.optimizers.Adam(0.05),
            "loss": ["mse", "sparse_categorical_crossentropy"],
            "feature_cols": ["v", "c"],
            "label_cols": ["y", "kind"],
            **options,
        }
    )


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True)


class Gate(keras.callbacks.Callback):
    """Waits at the beginning of the second epoch until the test has killed an executor."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            wait_at_gate(self.folder)


def test_a_fit_that_goes_on_when_an_executor_is_killed_transform_save_and_load(spark, tmp_path):
    """Vectors, several inputs and outputs, weights, a validation column, a custom layer, a lambda, a store.

    The executor is killed at the beginning of the second epoch: the record of the first one stays.
    """
    df, model = table(spark), two_heads()
    before = model.get_weights()
    estimator = estimator_of(
        model,
        loss_weights=[0.7, 0.3],
        metrics=[[], ["accuracy"]],
        sample_weight_col="w",
        validation="held_out",
        batch_size=16,
        val_batch_size=7,
        epochs=8,
        random_seed=3,
        min_num_proc=1,
        callbacks=[Backends(keras.backend.backend()), Gate(str(tmp_path))],
        store=Store.create(tmp_path / "store"),
        run_id="mine",
    )
    fitted = with_a_killed_executor(spark, lambda: estimator.fit(df), tmp_path)
    history = fitted.getHistory()
    assert fitted.uid == estimator.uid
    assert [record["epoch"] for record in history] == [*range(8)]
    assert history[0]["rows"] == 180
    assert history[-1]["validation"]["loss"] < history[0]["validation"]["loss"] / 2
    assert history[-1]["validation"]["all_metrics"]["kind_accuracy"] > 0.9
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))
    assert float(fitted.getModel().optimizer.learning_rate) == pytest.approx(0.05)

    fitted.setOutputCols(["about", "scores"])
    scored = fitted.transform(df.coalesce(1)).toPandas()  # one process imports Keras, which takes seconds
    features = np.stack([vector.toArray() for vector in scored["v"]]), scored[["c"]].to_numpy()
    about, scores = fitted.getModel().predict([each.astype("float32") for each in features], verbose=0)
    np.testing.assert_allclose(scored["about"], about[:, 0], rtol=1e-4, atol=1e-5)
    assert isinstance(scored["scores"][0], DenseVector)
    np.testing.assert_allclose(np.stack([each.toArray() for each in scored["scores"]]), scores, rtol=1e-4, atol=1e-5)

    pipeline = PipelineModel.load(saved(Pipeline(stages=[fitted]).fit(df), tmp_path / "pipeline"))
    assert type(pipeline.stages[0]) is KerasModel
    path = saved(fitted, tmp_path / "model")
    loaded = KerasModel.load(path)
    assert loaded.getHistory() == history
    assert all(
        np.array_equal(one, other)
        for one, other in zip(loaded.getModel().get_weights(), fitted.getModel().get_weights(), strict=True)
    )
    assert int(loaded.getModel().optimizer.iterations) == int(fitted.getModel().optimizer.iterations) > 0
    alone = KerasModel.load_without_spark(path)
    assert len(alone.getModel().predict([np.ones((4, 3)), np.ones((4, 1))], verbose=0)) == 2


CONNECT = {
    "keras": """
import os
os.environ["KERAS_BACKEND"] = "torch"  # which compiles nothing
import keras
from pyspark.sql import functions as F
from hvd_cluster.spark.keras import KerasEstimator

keras.utils.set_random_seed(0)
options = {"num_proc": 1, "verbose": 0, "feature_cols": [["a", "b"]], "label_cols": ["y"], "validation": "held_out"}
df = spark.range(0, 400, 1, 2).withColumn("a", F.randn(1)).withColumn("b", F.randn(2))
df = df.withColumn("y", 2 * F.col("a") - F.col("b")).withColumn("held_out", F.col("id") % 5 == 0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
fitted = KerasEstimator(model=model, optimizer=keras.optimizers.SGD(0.1), loss="mse", epochs=3, **options).fit(df)
scored = fitted.setOutputCols(["found"]).transform(df)
result = {
    "rows": [record["rows"] for record in fitted.getHistory()],
    "error": scored.agg(F.avg(F.abs(F.col("found") - F.col("y")))).collect()[0][0],
}
"""
}


@pytest.mark.timeout(CONNECT_SECONDS + 20)
@pytest.mark.skipif(find_spec("torch") is None, reason="the client has Keras on torch")
def test_a_client_of_spark_connect(result_of):
    result = result_of("keras")
    assert result["rows"] == [320] * 3
    assert result["error"] < 0.1


def saved(stage, path):
    stage.write().overwrite().save(str(path))
    return str(path)


class Here(Backend):
    """Runs the function in this process."""

    def run(self, fn, args=(), kwargs=None, env=None):
        self.env = env
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


@pytest.fixture
def engine():
    yield
    basics.shutdown()


@pytest.mark.usefixtures("engine")
def test_rows_in_files(spark, tmp_path):
    """With a backend of one's own, and a model that the user has compiled and trained."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    backend = Here()
    estimator = estimator_of(
        model,
        num_proc=None,
        optimizer=None,
        loss=None,
        feature_cols=["v"],
        label_cols=["y"],
        backend=backend,
        store=Store.create(tmp_path),
        backend_env={"LIBHDFS_OPTS": "-Xms1g"},
    )
    fitted = estimator.fit(table(spark, 40).coalesce(1))
    assert set(fitted.getHistory()[0]["train"]["all_metrics"]) == {"mae"}
    assert int(fitted.getModel().optimizer.iterations) == 3  # one of the user's, and two of 32 and 8 rows
    assert backend.env == {"KERAS_BACKEND": keras.backend.backend(), "LIBHDFS_OPTS": "-Xms1g"}


def test_an_estimator_is_saved_and_loaded(spark, tmp_path):
    estimator = estimator_of(two_heads(), epochs=7, callbacks=[keras.callbacks.EarlyStopping(patience=3)])
    loaded = KerasEstimator.load(saved(estimator, tmp_path / "saved"))
    assert (loaded.uid, loaded.getEpochs(), loaded.getLoss()) == (estimator.uid, 7, estimator.getLoss())
    assert float(loaded.getOptimizer().learning_rate) == pytest.approx(0.05)
    assert loaded.getCallbacks()[0].patience == 3
    assert [layer.name for layer in loaded.getModel().layers] == [layer.name for layer in estimator.getModel().layers]


def by_name():
    a, b = keras.Input((3,), name="p"), keras.Input((1,), name="q")
    return keras.Model({"p": a, "q": b}, [keras.layers.Dense(1)(a), keras.layers.Dense(1)(b)])


class Unsaved(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": None}, "model is None, but must be a keras.Model"),
        ({"model": 3}, "model is 3, but must be a keras.Model"),
        ({"optimizer": None}, "there is no optimizer; give one"),
        ({"optimizer": 0.1}, "optimizer is 0.1, but must be an optimizer of Keras"),
        ({"loss": None}, "there is no loss; give one"),
        ({"loss": ["mse", "mse", "mse"]}, "loss does not fit label_cols: there are 3 values"),
        ({"loss_weights": [1.0]}, "loss_weights has 1 values, but label_cols names 2"),
        ({"label_cols": ["y"]}, "label_cols has 1 entries: .* but the model has 2 outputs"),
        ({"feature_cols": ["v"]}, "feature_cols has 1 entries: .* but the model has 2 inputs: .*'v', 'c'"),
        ({"feature_cols": ["c", "v"]}, r"feature_cols is \['c', 'v'\], but the inputs .* in another order"),
        ({"feature_cols": ["v", ["c", "w"]]}, r"the model says that a row of c, w has the shape \[1\]"),
        ({"model": by_name}, r"a dictionary with the keys \['p', 'q'\]; name the columns like them"),
        (
            {"model": lambda: keras.Sequential([keras.Input((3,)), Unsaved(3)])},
            "Keras cannot make the model.*Unsaved",
        ),
        ({"callbacks": [print]}, "must have callbacks of Keras only"),
        ({"callbacks": [keras.callbacks.BackupAndRestore("x")]}, "BackupAndRestore, .*; give store and run_id"),
        ({"checkpoint_callback": print}, "must be a keras.callbacks.ModelCheckpoint"),
        ({"custom_objects": [print]}, "custom_objects is .*, but must be a dictionary"),
        ({"min_num_proc": 1, "backward_passes_per_step": 2}, "max_num_proc None, but backward_passes_per_step is 2"),
        ({"max_num_proc": 2, "optimizer": averaging()}, "max_num_proc 2, but the optimizer has use_ema=True"),
        (
            {"min_num_proc": 1, "model": lambda: keras.Sequential([keras.layers.Dense(1)])},
            "the model has no variables yet",
        ),
        ({"validation": "text"}, "validation names 'text', a column of type string"),
        ({"run_id": "mine"}, "run_id is 'mine', but there is no store"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_anything_starts(spark, given, text):
    df = table(spark, 8).withColumn("text", F.lit("hello"))
    estimator = estimator_of(two_heads())
    if callable(given.get("model")):
        given = {**given, "model": given["model"](), **({} if given["model"] is by_name else ONE)}
    with pytest.raises(ValueError, match=text):
        estimator.fit(df, {getattr(estimator, name): value for name, value in given.items()})


ONE = {"feature_cols": ["v"], "label_cols": ["y"], "loss": "mse"}
