"""transform, save and load as a client of Spark Connect, whose server is a process of its own."""

from pathlib import Path

import pytest
from spark_cluster import CONNECT_SECONDS

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(CONNECT_SECONDS + 20)

TRANSFORM = """
import os, sys, warnings
sys.path.insert(0, {folder!r})
import cloudpickle
import scored_models
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from scored_models import Mean, adding
from hvd_cluster.spark.torch import TorchModel

folder = sys.argv[1] + ".models"
rows = [(float(i), i, Vectors.sparse(2, {{1: 2.0}}) if i % 2 else Vectors.dense([1.0, i])) for i in range(20)]
df = spark.createDataFrame(rows, ["a", "b", "v"])
result = {{}}

def values(scored, name):
    return [row[name] for row in sorted(scored.collect(), key=lambda row: row["b"])]

# Above the limit of a closure, so the model goes as a file, in pieces.
large = adding(1.0, 1.0, outputs=2)
large.extra = torch.nn.Parameter(torch.zeros(5_000_000))
model = TorchModel(
    model=large, feature_columns=["v"], label_columns=["b"], history=[{{"loss": 0.5}}], _metadata={{"b": "bigint"}},
    optimizer=torch.optim.SGD(large.parameters(), lr=0.25), loss=lambda output, label: (output - label).sum(),
)
result["vectors"] = [list(vector) for vector in values(model.transform(df), "b__output")]
result["source"] = type(model._shipment.source).__name__
result["again"] = values(model.transform(df), "b__output") == values(model.transform(df), "b__output")
model.save(folder + "/model")
for run in ("first", "second"):
    model.setRunId(run).write().overwrite().save(folder + "/model")
found = TorchModel.load(folder + "/model")
result["loaded"] = [found.getRunId(), found.getHistory(), found.getOptimizer().param_groups[0]["lr"]]
result["local"] = TorchModel.load_without_spark(folder + "/model").getRunId()
result["same"] = values(found.transform(df), "b__output") == values(model.transform(df), "b__output")

small = TorchModel(
    model=adding(1.0, 2.0), feature_columns=["features"], label_columns=["b"], _metadata={{"b": "bigint"}}
)
fitted = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), small]).fit(df)
for _ in range(2):
    fitted.write().overwrite().save(folder + "/pipeline")
loaded = PipelineModel.load(folder + "/pipeline")
result["pipeline"] = values(loaded.transform(df), "b__output")
result["small"] = type(loaded.stages[1]._shipment.source).__name__

mean = Mean()
grid = ParamGridBuilder().addGrid(mean.factor, [0.0, 1.0]).addGrid(mean.model, [adding(9.0)]).build()
evaluator = RegressionEvaluator(labelCol="y", predictionCol="prediction")
search = CrossValidator(estimator=mean, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2)
result["scores"] = search.fit(df.selectExpr("a AS x", "7.0D + 0 * a AS y")).avgMetrics

stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
result["stream"] = TorchModel(
    model=adding(1.0), feature_columns=["value"], label_columns=["value"], _metadata={{"value": "bigint"}}
).transform(stream).columns
"""


CONNECT = {"transform": TRANSFORM.format(folder=str(Path(__file__).parent))}


@pytest.fixture
def result(result_of):
    return result_of("transform")


def test_a_client_transforms_with_a_large_model(result):
    assert result["vectors"] == [[2.0, 3.0] if i % 2 else [1.0 + i, 2.0 + i] for i in range(20)]
    assert result["again"]
    assert (result["source"], result["small"]) == ("ArtifactSource", "InlineSource")
    assert result["stream"] == ["timestamp", "value", "value__output"]


def test_a_client_saves_and_loads(result):
    assert result["loaded"] == ["second", [{"loss": 0.5}], 0.25]
    assert result["local"] == "second"
    assert result["same"]
    assert result["pipeline"] == [3 * i for i in range(20)]


def test_a_client_searches_over_parameters(result):
    assert result["scores"] == pytest.approx([7.0, 0.0], abs=1e-5)
