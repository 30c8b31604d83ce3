"""A LightningEstimator on a real cluster of two executors."""

import importlib
import logging

import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

from lightning.pytorch.callbacks import StochasticWeightAveraging  # noqa: E402

from hvd_cluster.core import basics  # noqa: E402
from hvd_cluster.spark.estimators.backend import Backend  # noqa: E402
from hvd_cluster.spark.estimators.store import Store  # noqa: E402
from hvd_cluster.spark.lightning import LightningEstimator, LightningModel  # noqa: E402
from hvd_cluster.spark.torch import FitCallback  # noqa: E402

# Spark keeps its own processes and connections, and torch sets a variable.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes", "environment"),
]


def points(spark, rows=400):
    """y = 2 a - b, and whether the row is for validation."""
    table = spark.range(rows).select(F.randn(1).alias("a"), F.randn(2).cast("float").alias("b"), "id")
    return table.select("*", (2 * F.col("a") - F.col("b")).alias("y"), (F.col("id") % 4 == 0).alias("held_out"))


def plane(package="lightning.pytorch", without=()):
    base = importlib.import_module(package).LightningModule

    class Plane(base):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, features):
            return self.layer(features)

        def training_step(self, batch, batch_idx):
            loss = (self(batch["features"])[:, 0] - batch["y"]).square().mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", (self(batch["features"])[:, 0] - batch["y"]).square().mean(), prog_bar=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    for name in without:
        delattr(Plane, name)
    return Plane()


def by_hand():
    module = plane()
    module.automatic_optimization = False
    return module


def estimator_of(model=None, **options):
    options = {"num_proc": 2, "verbose": 0, "feature_cols": ["features"], "label_cols": ["y"], **options}
    return LightningEstimator(model=plane() if model is None else model, **options)


def test_a_pipeline_is_fitted_saved_and_loaded(spark, tmp_path, caplog):
    """By a worker that may go: test_lightning_elastic.py has changes of the ranks, and the example ranks that stay."""
    from pytorch_lightning.callbacks import EarlyStopping

    df, model = points(spark), plane("pytorch_lightning")
    estimator = estimator_of(
        model,
        num_proc=1,
        min_num_proc=1,
        validation="held_out",
        epochs=12,
        callbacks=[EarlyStopping("val_loss", min_delta=1e-4)],
        trainer_args={"gradient_clip_val": 5.0},
        store=Store.create(tmp_path / "store"),
        run_id="mine",
        random_seed=1,
        verbose=1,
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    with caplog.at_level(logging.INFO, "hvd_cluster.spark.estimators"):
        pipeline = Pipeline(stages=[assembler, estimator]).fit(df)
    fitted = pipeline.stages[-1]
    history = fitted.getHistory()
    assert sum(" rows/s, loss " in record.getMessage() for record in caplog.records) == len(history)
    assert [record["rows"] for record in history] == [300] * len(history)
    assert history[-1]["validation"]["loss"] < 0.01
    assert history[-1]["train"]["all_metrics"] == {"train_loss": pytest.approx(history[-1]["train"]["loss"])}
    assert torch.equal(model.layer.weight, plane().layer.weight)  # the user's own model did not change

    estimator.save(str(tmp_path / "estimator"))
    again = LightningEstimator.load(str(tmp_path / "estimator"))
    assert (again.uid, again.getTrainerArgs(), again.getStore()) == (estimator.uid, {"gradient_clip_val": 5.0}, None)
    assert [type(callback) for callback in again.getCallbacks()] == [EarlyStopping]
    assert torch.equal(again.getModel().layer.weight, model.layer.weight)
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert isinstance(loaded.stages[-1], LightningModel)
    scored = loaded.transform(df.coalesce(1))  # one process imports Lightning, which takes seconds
    assert scored.columns == [*df.columns, "features", "y__output"]
    assert scored.agg(F.max(F.abs(F.col("y") - F.col("y__output")))).first()[0] < 0.5
    [stage] = (tmp_path / "pipeline" / "stages").glob("1_*")
    alone = LightningModel.load_without_spark(str(stage))
    assert torch.equal(alone.getModel().layer.weight, fitted.getModel().layer.weight)
    assert (tmp_path / "store" / "runs" / "mine" / "logs" / "history.json").exists()


class Here(Backend):
    """Runs the function in this process."""

    def run(self, fn, args=(), kwargs=None, env=None):
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


@pytest.fixture
def engine():
    yield
    basics.shutdown()


@pytest.mark.usefixtures("engine")
def test_a_model_of_torch(spark, tmp_path):
    model = torch.nn.Linear(2, 1)
    estimator = estimator_of(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=torch.nn.functional.mse_loss,
        metrics=[lambda output, label: (output - label).abs().mean()],
        feature_cols=[["a", "b"]],
        epochs=5,
        num_proc=None,
        backend=Here(),
    )
    estimator.save(str(tmp_path / "saved"))
    loaded = LightningEstimator.load(str(tmp_path / "saved"))
    assert (loaded.getOptimizer().param_groups[0]["lr"], loaded.uid) == (0.05, estimator.uid)
    fitted = loaded.setBackend(Here()).setStore(Store.create(tmp_path / "store")).fit(points(spark).coalesce(1))
    history = fitted.getHistory()
    assert history[-1]["train"]["all_metrics"]["metric_0_0"] < history[0]["train"]["all_metrics"]["metric_0_0"] / 2
    assert fitted.getModel().weight.detach()[0].tolist() == pytest.approx([2, -1], abs=0.2)
    assert fitted.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)


def test_without_forward_there_are_no_scores(spark):
    model = LightningModel(model=plane(without=["forward"]), feature_columns=[["a", "b"]], label_columns=["y"])
    with pytest.raises(ValueError, match="Plane has no forward, which transform calls"):
        model.transform(points(spark))


class OtherCallback(FitCallback):
    """One of a TorchEstimator."""


LOSS = torch.nn.functional.mse_loss
OPTIMIZER = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1)


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        (None, {"model": None}, "model is None, but must be a LightningModule, or a torch.nn.Module with a loss"),
        (torch.nn.Linear(2, 1), {}, "optimizer is None, but Linear is no LightningModule"),
        (
            torch.nn.Linear(2, 1),
            {"optimizer": OPTIMIZER},
            "there is no loss, but Linear is no LightningModule",
        ),
        (plane(), {"loss": LOSS}, "loss is given, but Plane is a LightningModule, whose .* leave it out"),
        (plane(), {"metrics": [LOSS]}, "metrics is given, but Plane is a LightningModule"),
        (plane(without=["training_step"]), {}, "Plane has no training_step; define it"),
        (plane(without=["configure_optimizers"]), {}, "Plane has no configure_optimizers; define it"),
        (
            plane(without=["validation_step"]),
            {"validation": 0.2},
            "validation is 0.2, but Plane has no validation_step, which would see these rows",
        ),
        (plane(), {"label_cols": ["nothing"]}, "label_cols names 'nothing', which the DataFrame does not have"),
        (plane(), {"callbacks": [OtherCallback()]}, "objects of a subclass of lightning.pytorch.Callback only"),
        (
            torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)),
            {"loss": LOSS, "optimizer": OPTIMIZER, "callbacks": [StochasticWeightAveraging(0.1)]},
            "a StochasticWeightAveraging, but Sequential has layers of batch norm, .* such as LayerNorm, or an EMA",
        ),
        (plane(), {"trainer_args": {"devices": 2}}, "trainer_args has 'devices'; give num_proc"),
        (plane(), {"trainer_args": {"max_steps": 2}, "validation": 0.2}, "has 'max_steps', and there is a validation"),
        (
            plane("pytorch_lightning"),
            {"trainer_args": {"gradient_clip": 2}},
            "trainer_args has 'gradient_clip', which the Trainer of pytorch_lightning does not have; did you mean 'gra",
        ),
        (plane(), {"trainer_args": 3}, "trainer_args is 3, but must be a dictionary"),
        (plane(), {"sharded": "gpu"}, "sharded is 'gpu', but must be False, True, 'host' or 'rank'"),
        (
            by_hand(),
            {"sharded": True},
            "sharded is given, but Plane has manual optimization: .* automatic optimization",
        ),
        (
            plane(),
            {"sharded": True, "trainer_args": {"sync_batchnorm": True}},
            "sharded is given with batch norm over all workers, .* leave out sync_batchnorm",
        ),
        (plane(), {"num_gpus": 2}, "num_gpus is 2, but a worker has one GPU or none"),
        (by_hand(), {"min_num_proc": 1}, "min_num_proc is given, but Plane has manual optimization: .* leave out min"),
        (
            plane(),
            {"max_num_proc": 4, "callbacks": [StochasticWeightAveraging(0.1)]},
            "max_num_proc is given, but a worker that comes later cannot have the averages, .* callback Stochas",
        ),
        (plane(), {"train_minibatch_fn": LOSS}, "train_minibatch_fn is .* write training_step of a LightningModule"),
        (plane(), {"loss_constructors": [LOSS]}, "loss_constructors is .* make the losses in the LightningModule"),
        (plane(), {"input_shapes": [[2]]}, r"input_shapes has \[2\], but a shape must begin with -1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_anything_starts(spark, model, given, text):
    df = points(spark, 40).withColumn("features", F.array("a", "b"))
    estimator = estimator_of(model)
    with pytest.raises(ValueError, match=text):
        estimator.fit(df, {getattr(estimator, name): value for name, value in given.items()})
