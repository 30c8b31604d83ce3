"""A TorchEstimator on a real cluster of two executors."""

import io
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from pyspark.util import inheritable_thread_target
from spark_training import wait_at_gate, with_a_killed_executor

torch = pytest.importorskip("torch")


import hvd_cluster.torch as hvd  # noqa: E402
from hvd_cluster.core import basics  # noqa: E402
from hvd_cluster.spark.estimators.backend import Backend  # noqa: E402
from hvd_cluster.spark.estimators.columns import with_boolean_validation  # noqa: E402
from hvd_cluster.spark.estimators.parquet import prepare_data  # noqa: E402
from hvd_cluster.spark.estimators.store import Store  # noqa: E402
from hvd_cluster.spark.torch import EarlyStopping, FitCallback, TorchEstimator  # noqa: E402

# Spark keeps its own processes and connections, and torch sets a variable.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes", "environment"),
]


def points(spark, rows=600):
    """y = 2 a - b, and whether it is above 0."""
    table = spark.range(rows).select(F.randn(1).alias("a"), F.randn(2).cast("float").alias("b"), "id")
    return table.withColumn("y", 2 * F.col("a") - F.col("b"))


def linear(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    options = {"num_proc": 2, "verbose": 0, "loss": torch.nn.functional.mse_loss, **options}
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.05))
    return TorchEstimator(model=model, feature_cols=[["a", "b"]], label_cols=["y"], **options)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 1), torch.nn.Linear(1, 2)

    def forward(self, triple, single):
        return self.first(triple.reshape(-1, 3)), self.second(single)


def test_all_kinds_of_columns_in_one_fit(spark):
    """Vectors, dense and sparse, several inputs and outputs, weights, a validation column of fractions."""
    rows = []
    for number in range(240):
        a, b, c = (math.sin(number * factor) for factor in (1.1, 2.3, 3.7))
        vector = Vectors.dense(a, b, 0.0) if number % 2 else Vectors.sparse(3, [0, 1], [a, b])
        rows.append((vector, c, a - b, int(c > 0), 1.0 + number % 2, 0.5 if number % 4 == 0 else 0.0))
    df = spark.createDataFrame(rows, ["v", "c", "y", "kind", "w", "held_out"])
    torch.manual_seed(0)
    model = TwoHeads()
    estimator = TorchEstimator(
        num_proc=2,
        verbose=0,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=[torch.nn.functional.mse_loss, torch.nn.CrossEntropyLoss()],
        loss_weights=[0.7, 0.3],
        metrics=[
            [lambda output, label: output.mean(), lambda output, label: (output.argmax(1) == label).float().mean()]
        ],
        input_shapes=[[-1, 3, 1], [-1, 1]],
        feature_cols=["v", "c"],
        label_cols=["y", "kind"],
        sample_weight_col="w",
        validation="held_out",
        transformation_fn=lambda batch: batch | {"c": batch["c"] * 2},
        batch_size=16,
        val_batch_size=7,
        epochs=8,
        random_seed=3,
    )
    fitted = estimator.fit(df)
    assert fitted.uid == estimator.uid
    assert fitted.getOrDefault("_input_widths") == [3, 1]
    history = fitted.getHistory()
    assert [record["rows"] for record in history] == [180] * 8
    assert history[-1]["validation"]["loss"] < history[0]["validation"]["loss"] / 2
    assert history[-1]["validation"]["all_metrics"][0][1] > 0.9
    assert torch.equal(model.first.weight, estimator.getModel().first.weight)  # the user's own model did not change
    assert not torch.equal(model.first.weight, fitted.getModel().first.weight)


def png(number):
    """A picture of 2 x 2 points, or its bytes where there is no library for pictures."""
    try:
        from PIL import Image
    except ImportError:
        return bytes([number] * 4)
    file = io.BytesIO()
    Image.frombytes("L", (2, 2), bytes([number] * 4)).save(file, "png")
    return file.getvalue()


def pixels(data):
    try:
        from PIL import Image
    except ImportError:
        return list(data)
    return list(Image.open(io.BytesIO(data)).tobytes())


def decoded(batch):
    images = torch.tensor([pixels(image) for image in batch["image"]], dtype=torch.uint8)
    words = torch.tensor([[float("dark" in text)] for text in batch["text"]])
    return batch | {"image": images / 255, "text": words}


class Brightness(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 1)

    def forward(self, image, text):
        return self.net(torch.cat([image.flatten(1), text], 1))


def test_images_and_strings(spark):
    """The function that makes tensors of them does so in transform, too, where there is no label."""
    rows = [(f"{'dark' if i % 2 else 'hell'} \u00fc{i}", png(i), i / 255 - i % 2) for i in range(200)]
    df = spark.createDataFrame(rows, ["text", "image", "y"])
    torch.manual_seed(0)
    model = Brightness()
    estimator = TorchEstimator(
        num_proc=1,
        verbose=0,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loss=torch.nn.functional.mse_loss,
        input_shapes=[[-1, 1, 2, 2], [-1, 1]],
        feature_cols=["image", "text"],
        label_cols=["y"],
        validation=0.2,
        transformation_fn=decoded,
        batch_size=16,
        epochs=12,
        random_seed=1,
    )
    fitted = estimator.fit(df).setOutputCols(["p"])
    history = fitted.getHistory()
    assert history[-1]["validation"]["loss"] < history[0]["validation"]["loss"] / 10
    scored = fitted.transform(df).collect()
    assert [row["p"] for row in scored] == pytest.approx([row["y"] for row in scored], abs=0.3)
    stream = spark.readStream.format("rate").load().selectExpr("CAST(value AS STRING) AS text", "X'00' AS image")
    assert fitted.transform(stream).isStreaming
    with pytest.raises(ValueError, match=r"not known before the stream .* a DataFrame that has a row first"):
        fitted.copy().setModel(Brightness()).transform(stream)


class Gate(FitCallback):
    """Waits at the beginning of the second epoch until the test has killed an executor."""

    def __init__(self, folder):
        self.folder = folder

    def on_epoch_begin(self, epoch):
        if epoch == 1:
            wait_at_gate(self.folder)


def test_a_sharded_fit_that_goes_on_when_an_executor_is_killed(spark, tmp_path):
    """At the beginning of its second epoch: the record of the first one stays, and the fit comes to its end.

    That of test_spark_estimator_keras.py is not sharded.
    """
    gate = Gate(str(tmp_path))
    estimator = linear(epochs=3, min_num_proc=1, validation=0.2, callbacks=[gate], sharded=True)
    fitted = with_a_killed_executor(spark, lambda: estimator.fit(points(spark)), tmp_path)
    history = fitted.getHistory()
    assert [record["epoch"] for record in history] == [0, 1, 2]
    assert history[0]["rows"] > 400
    assert history[2]["validation"]["loss"] < history[0]["validation"]["loss"]
    assert fitted.getModel().weight.detach()[0].tolist() == pytest.approx([2, -1], abs=0.1)
    assert fitted.getOrDefault("_input_widths") == [2]


class Here(Backend):
    """Runs the function in this process, as Horovod's tests do."""

    def run(self, fn, args=(), kwargs=None, env=None):
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


@pytest.fixture
def engine():
    yield
    basics.shutdown()


def test_a_fraction_for_validation_that_is_no_number_is_a_null(spark):
    """For Spark NaN is more than 0, so that such a row would be kept apart. A fit refuses nulls."""
    df = spark.createDataFrame([(0.0,), (0.5,), (math.nan,), (None,)], "held_out double")
    assert [row[0] for row in with_boolean_validation(df, "held_out").collect()] == [False, True, None, None]


@pytest.mark.usefixtures("engine")
def test_rows_in_files(spark, tmp_path):
    """A backend of one's own gets them through the store; a fit on files gives the same."""
    store, df = Store.create(tmp_path), points(spark, 200).coalesce(1)
    estimator = linear(num_proc=None, store=store, validation=0.25, epochs=2, random_seed=5, backend=Here())
    first = estimator.fit(df)
    assert first.getHistory()[1]["validation"]["loss"] < first.getHistory()[0]["validation"]["loss"]
    assert not list(tmp_path.glob("runs/*/rows*"))
    for epochs in (1, 3):
        fitted = estimator.fit(df, {estimator.run_id: "mine", estimator.epochs: epochs})
    assert [record["epoch"] for record in fitted.getHistory()] == list(range(4))
    df.write.parquet(store.get_train_data_path())
    second = estimator.fit_on_parquet()
    assert torch.equal(first.getModel().weight, second.getModel().weight)
    assert first.getOrDefault("_input_widths") == second.getOrDefault("_input_widths") == [2]
    on_spark = estimator.fit_on_parquet({estimator.backend: None, estimator.num_proc: 2})
    assert on_spark.getHistory()[0]["rows"] == second.getHistory()[0]["rows"]
    held_out = df.withColumn("held_out", F.col("id") % 4 / 3)
    with prepare_data(2, store, held_out, ["y"], ["a", "b"], "held_out", partitions_per_process=1) as number:
        prepared = estimator.fit_on_parquet({estimator.validation: None}, number).getHistory()
    assert (prepared[0]["rows"], "validation" in prepared[0]) == (50, True)
    estimator.setStore(None)
    with pytest.raises(ValueError, match=r"has no method run_on_dataframe, so Spark writes .* there is no store"):
        estimator.fit(df)


def test_an_estimator_is_saved_and_loaded(spark, tmp_path):
    optimizer_of = torch.optim.Adam
    model = torch.nn.Linear(2, 1)
    estimator = linear(epochs=7, optimizer=optimizer_of(model.parameters(), lr=0.5))
    estimator.save(str(tmp_path / "saved"))
    loaded = TorchEstimator.load(str(tmp_path / "saved"))
    assert (loaded.uid, loaded.getEpochs(), loaded.getFeatureCols()) == (estimator.uid, 7, [["a", "b"]])
    assert torch.equal(loaded.getModel().weight, estimator.getModel().weight)
    assert loaded.getOptimizer().param_groups[0]["lr"] == 0.5
    assert loaded.getLoss() is torch.nn.functional.mse_loss


class WithoutPySpark(FitCallback):
    """Ends the fit where a worker has loaded it, which would take a second at the start of each fit."""

    def on_epoch_begin(self, epoch):
        import sys

        assert "pyspark" not in sys.modules


def test_two_fits_at_once(spark):
    """Each has a worker of its own beside one of the two slots."""
    df, callbacks = points(spark), [EarlyStopping(9), WithoutPySpark()]
    fits = [linear(num_proc=1, epochs=2, callbacks=callbacks, validation=0.2) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(inheritable_thread_target(spark)(lambda each: each.fit(df)), fits))
    assert [len(fitted.getHistory()) for fitted in found] == [2, 2]
    assert all(fitted.getHistory()[1]["train"]["loss"] < fitted.getHistory()[0]["train"]["loss"] for fitted in found)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"model": None}, ValueError, "model is None, but must be a torch.nn.Module"),
        ({"optimizer": "adam"}, ValueError, "optimizer is 'adam', but must be a torch.optim.Optimizer"),
        (
            {"optimizer": torch.optim.LBFGS(torch.nn.Linear(2, 1).parameters())},
            ValueError,
            "LBFGS evaluates .* give a train_minibatch_fn",
        ),
        ({"loss": None}, ValueError, "there is no loss; give one of loss and loss_constructors"),
        ({"loss_constructors": [print]}, ValueError, "both loss and loss_constructors are given"),
        ({"label_cols": None}, ValueError, "label_cols is left out"),
        ({"label_cols": ["nothing"]}, ValueError, "label_cols names 'nothing', which the DataFrame does not have"),
        ({"feature_cols": ["text"]}, ValueError, "has the columns text of strings .* give a transformation_fn that"),
        ({"feature_cols": [["a", "text"]]}, ValueError, "a list with both 'a' .numbers. and 'text' .strings."),
        ({"label_cols": ["text"]}, ValueError, "label_cols has the column 'text', which is of type string; index it"),
        ({"validation": "text"}, ValueError, "validation names 'text', a column of type string; it must be boolean"),
        ({"loss_weights": [1.0, 2.0]}, ValueError, "loss_weights has 2 values, but label_cols names 1"),
        ({"label_shapes": [[2]]}, ValueError, r"label_shapes says that a row of y has the shape \[2\]"),
        ({"input_shapes": [[2], [2]]}, ValueError, "input_shapes has 2 shapes, .* make 1 inputs; .* make one input"),
        ({"input_shapes": [[2, 1]]}, ValueError, r"input_shapes has \[2, 1\], but a shape must begin with -1"),
        ({"input_shapes": [[-1, 3]]}, ValueError, r"input_shapes says that a row of a, b has the shape \[3\]"),
        ({"num_proc": None, "backend": 3}, ValueError, "backend is 3, but must have the methods run"),
        ({"sharded": "disk"}, ValueError, "sharded is 'disk', but must be False, True, 'host' or 'rank'"),
        (
            {"sharded": True, "model": hvd.SyncBatchNorm(2)},
            ValueError,
            "sharded is given with batch norm over all workers",
        ),
        ({"callbacks": [print]}, ValueError, "must have objects of a subclass of FitCallback only"),
        ({"run_id": "mine"}, ValueError, "run_id is 'mine', but there is no store"),
        ({"min_num_proc": 1, "train_steps_per_epoch": 2}, ValueError, "workers that come and go see all rows"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_anything_starts(spark, given, error, text):
    df = points(spark, 40).withColumn("text", F.lit("hello"))
    estimator = linear()
    with pytest.raises(error, match=text):
        estimator.fit(df, {getattr(estimator, name): value for name, value in given.items()})


def test_something_that_is_no_dataframe():
    with pytest.raises(TypeError, match=r"df is a builtins\.list, but must be a DataFrame of Spark"):
        linear().fit([1, 2])
