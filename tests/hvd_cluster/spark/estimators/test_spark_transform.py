"""transform, save and load on two executors of a classic session."""

import subprocess
import sys
from dataclasses import replace

import cloudpickle
import pytest
from pyspark.errors import PySparkException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import DenseVector, Vectors, VectorUDT
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F
from pyspark.sql import types as T

torch = pytest.importorskip("torch")

import scored_models  # noqa: E402
from scored_models import Mean, adding  # noqa: E402

from hvd_cluster.spark.estimators import saved_form  # noqa: E402
from hvd_cluster.spark.torch import TorchModel  # noqa: E402
from tests.doc_blocks import blocks, execute  # noqa: E402

# Spark keeps its own processes and connections, and torch sets a variable.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes", "environment"),
]


@pytest.fixture(autouse=True, scope="module")
def models_by_value():
    cloudpickle.register_pickle_by_value(scored_models)
    yield
    cloudpickle.unregister_pickle_by_value(scored_models)


@pytest.fixture(scope="module")
def table(spark, tmp_path_factory):
    """Rows with all kinds of columns, from Parquet files, as most tables are."""
    rows = [
        (float(i), i, Vectors.sparse(3, {1: 2.0}) if i % 2 else Vectors.dense([1.0, 2.0, i]), [1.0, float(i)])
        for i in range(40)
    ]
    path = str(tmp_path_factory.mktemp("table") / "rows")
    spark.createDataFrame(rows, ["a", "b", "v", "r"]).withColumn("a.b", F.col("a")).write.parquet(path)
    return spark.read.parquet(path)


def rows_of(df):
    return sorted(df.collect(), key=lambda row: row["b"])


class Heads(torch.nn.Module):
    """Three inputs, three outputs, and a parameter that is too large for the closure of a UDF."""

    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(200_000))
        self.function = lambda x: x.sum(1, keepdim=True)

    def forward(self, vector, array, numbers):
        return vector, self.function(array) + 0.6, self.function(numbers) > 30


def test_all_kinds_of_columns(table):
    model = TorchModel(
        model=Heads(),
        feature_columns=["v", "r", ["a", "b", "a.b"]],
        label_columns=["v", "b", "flag"],
        _metadata={"v": "vector", "b": "bigint", "flag": "boolean"},
    )
    table = table.withColumn("_hvd_Outputs", F.lit(1))  # not the one that transform makes for a moment
    scored = model.transform(table)
    assert scored.columns == [*table.columns, "v__output", "b__output", "flag__output"]
    assert [scored.schema[name].dataType for name in ("b__output", "flag__output")] == [T.LongType(), T.BooleanType()]
    for i, row in enumerate(rows_of(scored)):
        assert type(row["v__output"]) is DenseVector
        assert row["v__output"] == DenseVector(row["v"].toArray())
        assert (row["b__output"], row["flag__output"]) == (round(1.6 + i), 3 * i > 30)


def test_several_numbers_are_a_vector_whatever_the_label_is(table):
    model = TorchModel(
        model=adding(1.0, 1.0, outputs=3), feature_columns=["r"], label_columns=["b"], _metadata={"b": "bigint"}
    )
    scored = model.setOutputCols(["scores"]).transform(table)
    assert [row["scores"] for row in rows_of(scored)] == [DenseVector([i + 1, i + 2, i + 3]) for i in range(40)]
    again = model.copy().setOutputCols(["more"]).transform(scored)
    assert all(row["scores"] == row["more"] for row in again.collect())


def test_rows_with_nulls(spark):
    df = spark.createDataFrame([(0, 1.0, Vectors.dense(1.0)), (1, None, Vectors.dense(2.0)), (2, 3.0, None)], [*"bxv"])
    model = TorchModel(
        model=torch.nn.Bilinear(1, 1, 2), feature_columns=["x", "v"], label_columns=["y"], _metadata={"y": "vector"}
    )
    skipped = rows_of(model.setHandleInvalid("skip").transform(df))
    kept = rows_of(model.setHandleInvalid("keep").transform(df))
    assert [row["b"] for row in skipped] == [0]
    assert [row["y__output"] is None for row in kept] == [False, True, True]
    assert kept[0] == skipped[0]
    with pytest.raises(
        PySparkException, match=r"column '\w+' has nulls, first in the row .*; fill or drop them before"
    ):
        model.setHandleInvalid("error").transform(df).collect()


def test_no_rows(spark, table):
    model = TorchModel(model=adding(1.0, 1.0), feature_columns=["r"], label_columns=["b"], _metadata={"b": "int"})
    scored = model.transform(table.where("b < 0"))
    assert scored.collect() == []
    assert scored.schema["b__output"].dataType == T.IntegerType()


def test_no_rows_after_a_fit(table):
    """The fit knows how many elements the arrays have, so that zeros can show the width of the output."""
    model = TorchModel(model=torch.nn.Linear(2, 3), feature_columns=["r"], label_columns=["b"], _metadata={"b": "int"})
    model._set(_input_widths=[2])
    empty = table.where("b < 0")
    assert model.transform(empty).schema["b__output"] == model.transform(table).schema["b__output"]
    assert isinstance(model.transform(empty).schema["b__output"].dataType, VectorUDT)


def test_a_stream(spark, table, tmp_path):
    table.repartition(2).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(table.schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    model = TorchModel(model=adding(1.0, 1.0), feature_columns=["r"], label_columns=["b"], _metadata={"b": "bigint"})
    with pytest.raises(ValueError, match=r"not known before the stream starts.* set input_shapes"):
        model.transform(stream)
    scored = model.setInputShapes([[-1, 2]]).transform(stream)
    query = scored.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "state"))
    query.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination(100)
    assert [row["b__output"] for row in rows_of(spark.read.parquet(str(tmp_path / "out")))] == list(range(1, 41))


def test_what_cannot_be_transformed(table):
    def transform(df=table, **options):
        settings = {"model": adding(1.0), "feature_columns": ["a"], "label_columns": ["b"], **options}
        return TorchModel(**settings).transform(df)

    model = TorchModel(model=adding(1.0), feature_columns=["a"], label_columns=["b"])
    with pytest.raises(ValueError, match="transform_batch_size is 0"):
        model.transform(table, {model.transform_batch_size: 0})
    with pytest.raises(ValueError, match="there is no model; give one with model= or setModel"):
        transform(model=None)
    with pytest.raises(ValueError, match="feature_columns is None, but must name at least one column"):
        transform(feature_columns=None)
    with pytest.raises(ValueError, match="names 'missing', which the DataFrame does not have"):
        transform(feature_columns=["missing"])
    with pytest.raises(ValueError, match="column 'a' has strings, but the model was trained with a"):
        transform(table.withColumn("a", F.lit("x")), _metadata={"a": "double"})
    with pytest.raises(ValueError, match="the DataFrame has a column 'B__output' already"):
        transform(table.withColumn("b__output", F.lit(1)), label_columns=["B"])
    with pytest.raises(ValueError, match="the model returned 1 outputs, but there are 2 label columns"):
        transform(label_columns=["a", "b"])


def test_a_model_and_its_optimizer_in_a_folder(spark, table, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_form, "PIECE_BYTES", 256 << 10)
    net = adding(1.0, 1.0)
    net.extra = torch.nn.Parameter(torch.zeros(500_000))  # 2 MB: eight pieces, and several messages
    model = TorchModel(
        model=net,
        feature_columns=["r"],
        label_columns=["b"],
        optimizer=torch.optim.SGD(net.parameters(), lr=0.25),
        history=[{"epoch": 0, "loss": 0.5}],
        loss=lambda output, label: (output - label).abs().mean(),
        _metadata={"b": "bigint"},
        run_id="run",
    )
    model.save(str(tmp_path / "model"))
    found = TorchModel.load(str(tmp_path / "model"))
    assert (found.uid, found.getRunId(), found.getHistory()) == (model.uid, "run", [{"epoch": 0, "loss": 0.5}])
    assert found.getLoss()(torch.tensor([3.0]), torch.tensor([1.0])) == 2
    parameters = found.getOptimizer().param_groups[0]["params"]
    assert all(one is other for one, other in zip(parameters, found.getModel().parameters(), strict=True))
    assert rows_of(found.transform(table)) == rows_of(model.transform(table))
    with pytest.raises(PySparkException, match="already exists"):
        model.save(str(tmp_path / "model"))
    model.setRunId("later").write().overwrite().save(str(tmp_path / "model"))
    assert TorchModel.read().load(str(tmp_path / "model")).getRunId() == "later"
    model.setLoss(sys.stdout)
    with pytest.raises(ValueError, match="parameter 'loss' cannot be saved"):
        model.write().overwrite().save(str(tmp_path / "model"))
    assert TorchModel.load(str(tmp_path / "model")).getRunId() == "later"


WITHOUT_SPARK = """
import sys
from hvd_cluster.spark.torch import TorchModel
from pyspark import SparkContext
from pyspark.sql import SparkSession

model = TorchModel.load_without_spark(sys.argv[1])
assert SparkSession.getActiveSession() is None
assert SparkContext._gateway is None
print(float(model.getModel()(__import__("torch").tensor([[2.0]]))), model.get_history(), model.getLabelColumns())
"""


def test_a_model_in_a_process_without_a_session(tmp_path, spark):
    model = TorchModel(model=adding(3.0), feature_columns=["x"], label_columns=["y"], history=[{"loss": 1.5}])
    model.save(str(tmp_path / "model"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SPARK, f"file://{tmp_path}/model"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "6.0 [{'loss': 1.5}] ['y']", done.stderr
    with pytest.raises(FileNotFoundError):
        TorchModel.load_without_spark(str(tmp_path / "nothing"))


def test_pipelines(table, tmp_path):
    model = TorchModel(
        model=adding(1.0, 2.0), feature_columns=["features"], label_columns=["b"], _metadata={"b": "bigint"}
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    fitted = Pipeline(stages=[assembler, model]).fit(table)
    expected = [3 * i for i in range(40)]
    assert [row["b__output"] for row in rows_of(fitted.transform(table))] == expected
    for _ in range(2):
        fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    found = PipelineModel.load(str(tmp_path / "pipeline"))
    assert [row["b__output"] for row in rows_of(found.transform(table))] == expected
    assert type(found.stages[1]) is TorchModel


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool")  # of PySpark
def test_searches_over_parameters(table):
    """They pass the parameters of the estimator, also ``model``, to the model of the same uid."""
    df = table.selectExpr("a AS x", "7.0D + 0 * a AS y")
    mean = Mean()
    grid = ParamGridBuilder().addGrid(mean.factor, [0.0, 1.0]).addGrid(mean.model, [adding(9.0)]).build()
    evaluator = RegressionEvaluator(labelCol="y", predictionCol="prediction", metricName="rmse")
    search = CrossValidator(
        estimator=Pipeline(stages=[mean]), estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2
    )
    found = search.fit(df)
    assert found.avgMetrics == pytest.approx([7.0, 0.0], abs=1e-5)
    assert found.bestModel.stages[0].getHistory() == [{"loss": 7.0}]
    split = TrainValidationSplit(estimator=mean, estimatorParamMaps=grid, evaluator=evaluator)
    metrics = split.fit(df).validationMetrics
    assert metrics == pytest.approx([7.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("block", blocks("fitted"), ids=lambda block: block.name)
def test_a_block_of_the_docs(spark, block, tmp_path):
    df = spark.range(50).selectExpr("CAST(id AS DOUBLE) AS x", "2.0D * id AS y")
    fitted = TorchModel(
        model=adding(2.0),
        feature_columns=["x"],
        label_columns=["y"],
        history=[{"epoch": 0, "train": {"loss": 0.5}}],
        _metadata={"y": "double"},
    )
    found = execute(replace(block, code=block.code.replace("/data", str(tmp_path))), df=df, fitted=fitted)
    if "error" in found:
        assert found["error"] == pytest.approx(0.0, abs=1e-5)
    if "module" in found:
        assert found["module"](torch.tensor([[2.0]])).tolist() == [[4.0]]
