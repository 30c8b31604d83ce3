"""Tell wines apart in a pipeline of Spark ML: ``python examples/spark_estimator_lightning.py``.

The names of the cultivars become numbers (``StringIndexer``), the columns of the chemical analysis become one vector
(``VectorAssembler``), and a LightningEstimator learns from these. A ``CrossValidator`` tries two sizes of the network,
each on one half of the rows and then on the other, and trains the better one again on all. The rows are few, so a fit
has one worker, and two fits run at a time. In the end a picture shows how the loss fell, and an evaluator of Spark ML
counts the wines of the test that were told apart correctly.

It starts Spark on this machine; ``--master`` names a cluster that runs already.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import torch
from digits import positive
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_wine
from spark_digits import add_spark_options, session
from torch import Tensor, nn

from hvd_cluster.spark.lightning import LightningEstimator

GOOD = 0.9
BAR = 40


class Cultivars(lightning.LightningModule):
    """A network with one hidden layer, whose output is the number of the class."""

    def __init__(self, columns: int, hidden: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, features: Tensor) -> Tensor:
        """For ``transform``: the class with the highest score, a number for each row."""
        return self.network(features).argmax(dim=1).float()

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch, a dictionary with a tensor for each column."""
        return nn.functional.cross_entropy(self.network(batch["features"]), batch["class"].long())

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The same for rows that are kept apart, and the share of them that the network gets right."""
        self.log("accuracy", (self(batch["features"]) == batch["class"]).float().mean())
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The estimator multiplies the rate by the number of workers."""
        return torch.optim.Adam(self.parameters(), lr=0.005)


def read(spark: SparkSession) -> DataFrame:
    """A row for each wine: its analysis, the name of its cultivar, and whether it is for the test."""
    table = load_wine(as_frame=True).frame
    table["cultivar"] = table.pop("target").map(lambda number: f"cultivar {number + 1}")
    table["test"] = table.index % 4 == 0
    return spark.createDataFrame(table)


def network(hidden: int, columns: int, seed: int) -> Cultivars:
    """A network with the same first weights in each run."""
    torch.manual_seed(seed)
    return Cultivars(columns, hidden)


def search(columns: Sequence[str], options: argparse.Namespace) -> CrossValidator:
    """What to train, and what to try."""
    estimator = LightningEstimator(
        num_proc=options.workers,
        model=network(options.hidden[0], len(columns), options.seed),
        feature_cols=["features"],
        label_cols=["class"],
        validation=0.2,
        batch_size=8,
        epochs=options.epochs,
        random_seed=options.seed,
    )
    stages = [
        StringIndexer(inputCol="cultivar", outputCol="class"),
        VectorAssembler(inputCols=list(columns), outputCol="analysis"),
        StandardScaler(inputCol="analysis", outputCol="features", withMean=True),
        estimator,
    ]
    sizes = [network(hidden, len(columns), options.seed) for hidden in options.hidden]
    return CrossValidator(
        estimator=Pipeline(stages=stages),
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.model, sizes).build(),
        evaluator=accuracy(),
        numFolds=2,
        parallelism=options.fits,
        seed=options.seed,
    )


def accuracy() -> MulticlassClassificationEvaluator:
    """The share of the wines that are told apart correctly."""
    return MulticlassClassificationEvaluator(labelCol="class", predictionCol="class__output", metricName="accuracy")


def picture(history: Sequence[dict[str, Any]]) -> str:
    """A line for each epoch, with a bar for the loss of the validation."""
    largest = max(record["validation"]["loss"] for record in history)
    lines = []
    for record in history:
        train, kept_apart = record["train"]["loss"], record["validation"]
        bar = "#" * round(BAR * kept_apart["loss"] / largest)
        losses = f"training {train:.4f}   validation {kept_apart['loss']:.4f} {bar:{BAR}}"
        lines.append(f"epoch {record['epoch'] + 1:2}   {losses}   accuracy {kept_apart['all_metrics']['accuracy']:.4f}")
    return "\n".join(lines)


def main() -> None:
    """Start Spark, search, score the rows of the test, and print scores and history."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = argparse.ArgumentParser(description="Tell wines apart in a pipeline of Spark ML.")
    add_spark_options(parser)
    parser.set_defaults(workers=1)
    parser.add_argument("--fits", type=positive, default=2, help="number of fits at a time (%(default)s)")
    parser.add_argument("--hidden", type=positive, nargs="+", default=[2, 16], help="sizes to try (%(default)s)")
    parser.add_argument("--epochs", type=positive, default=12, help="number of epochs of each fit (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the network and of the rows (%(default)s)")
    options = parser.parse_args()
    with session(options.master) as spark:
        wines = read(spark)
        columns = [name for name in wines.columns if name not in ("cultivar", "test")]
        found = search(columns, options).fit(wines.where("not test"))
        best = found.bestModel.stages[-1]
        for hidden, average in zip(options.hidden, found.avgMetrics, strict=True):
            print(f"{hidden:2} hidden: accuracy {average:.4f} on rows of the other folds")
        print(picture(best.getHistory()))
        scored = found.transform(wines.where("test"))
        score = accuracy().evaluate(scored)
    if score < GOOD:
        sys.exit(f"test accuracy: {score:.4f}, less than {GOOD}; give more --epochs")
    print(f"test accuracy: {score:.4f}")


if __name__ == "__main__":
    main()
