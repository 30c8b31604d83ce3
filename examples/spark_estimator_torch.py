"""Learn handwritten digits with an estimator of Spark ML: ``python examples/spark_estimator_torch.py``.

The network and the images are those of ``spark_digits.py``, but there is no training loop: ``fit`` trains on a
DataFrame, and ``transform`` adds the scores of the network to another one. In the end a picture shows how the loss
fell, and an evaluator of Spark ML counts the digits that were read correctly.

It starts Spark on this machine; ``--master`` names a cluster that runs already.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from digits import RATE, add_options, model
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession, functions
from sklearn.datasets import load_digits
from spark_digits import GOOD, add_spark_options, session
from torch import Tensor

from hvd_cluster.spark.torch import EarlyStopping, TorchEstimator

BAR = 40


def read(spark: SparkSession) -> DataFrame:
    """A row for each image: its pixels from 0 to 1, its digit, and whether it is for the test or for validation."""
    bunch = load_digits()
    table = pd.DataFrame({"pixels": list((bunch.data / 16).astype("float32")), "digit": bunch.target})
    table["test"], table["held_out"] = table.index % 5 == 0, table.index % 5 == 1
    return spark.createDataFrame(table, "pixels array<float>, digit int, test boolean, held_out boolean")


def accuracy(output: Tensor, digits: Tensor) -> Tensor:
    """The share of the images that the network gets right."""
    return (output.argmax(dim=1) == digits).float().mean()


def estimator(options: argparse.Namespace) -> TorchEstimator:
    """What to train, and how."""
    torch.manual_seed(options.seed)
    network = model()
    return TorchEstimator(
        num_proc=options.workers,
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9),
        loss=torch.nn.CrossEntropyLoss(),
        metrics=[accuracy],
        feature_cols=["pixels"],
        label_cols=["digit"],
        input_shapes=[[-1, 1, 8, 8]],
        validation="held_out",
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=[EarlyStopping(patience=5)],
        random_seed=options.seed,
    )


def picture(history: Sequence[dict[str, Any]]) -> str:
    """A line for each epoch, with a bar for the loss of the validation."""
    largest = max(record["validation"]["loss"] for record in history)
    lines = []
    for record in history:
        train, kept_apart = record["train"]["loss"], record["validation"]
        bar = "#" * round(BAR * kept_apart["loss"] / largest)
        losses = f"training {train:.4f}   validation {kept_apart['loss']:.4f} {bar:{BAR}}"
        lines.append(f"epoch {record['epoch'] + 1:2}   {losses}   accuracy {kept_apart['all_metrics'][0][0]:.4f}")
    return "\n".join(lines)


def best(scores: str) -> Any:
    """The column with the number of the highest of the ``scores``."""
    found = vector_to_array(scores)
    return (functions.array_position(found, functions.array_max(found)) - 1).cast("double")


def main() -> None:
    """Start Spark, fit, transform the rows of the test, and print scores and history."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("hvd_cluster.spark.estimators").setLevel(logging.INFO)  # a line for each epoch
    parser = argparse.ArgumentParser(description="Learn handwritten digits with an estimator of Spark ML.")
    add_spark_options(parser)
    add_options(parser)
    options = parser.parse_args()
    with session(options.master) as spark:
        table = read(spark)
        fitted = estimator(options).fit(table.where("not test").drop("test"))
        print(picture(fitted.getHistory()))
        scored = fitted.setOutputCols(["scores"]).transform(table.where("test")).withColumn("read_as", best("scores"))
        evaluator = MulticlassClassificationEvaluator(labelCol="digit", predictionCol="read_as", metricName="accuracy")
        found = evaluator.evaluate(scored)
    if found < GOOD:
        sys.exit(f"test accuracy: {found:.4f}, less than {GOOD}; give more --epochs")
    print(f"test accuracy: {found:.4f}")


if __name__ == "__main__":
    main()
