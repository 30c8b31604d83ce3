"""A regression with two inputs by an estimator of Spark ML for Keras: ``python examples/spark_estimator_keras.py``.

The function is that of ``spark_regression.py``, with an offset for each of eight stations, which the network must find
by itself: one input has ten variables, the other the number of the station, for an embedding. ``fit`` trains on a
DataFrame, and ``transform`` adds the predictions to another one. In the end a picture shows how the error fell, and an
evaluator of Spark ML says how large it is on rows that the network has not seen.

It starts Spark on this machine; ``--master`` names a cluster that runs already. ``KERAS_BACKEND`` chooses what is below
Keras, here and in the workers: tensorflow, torch or jax.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import keras
from digits import positive
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import DataFrame, SparkSession, functions
from spark_digits import add_spark_options, session
from spark_regression import VARIABLES, generate

from hvd_cluster.spark.keras import KerasEstimator

STATIONS = 8
GOOD = 1.3
RATE = 0.005
BAR = 40


def read(spark: SparkSession, rows: int, seed: int) -> DataFrame:
    """A row for each point: ten variables, the number of its station, the value, and whether it is for the test."""
    station = functions.floor(functions.rand(seed + 20) * STATIONS).cast("int")
    table = generate(spark, rows, seed).withColumn("station", station).withColumnRenamed("held_out", "test")
    return table.withColumn("y", functions.expr("float(y + 3 * cos(2 * station))"))


def model() -> keras.Model:
    """A small network with two inputs."""
    variables = keras.Input((len(VARIABLES),), name="variables")
    station = keras.Input((), name="station", dtype="int32")
    offset = keras.layers.Embedding(STATIONS, 4)(station)
    hidden = keras.layers.Concatenate()([variables, offset])
    for _ in range(2):
        hidden = keras.layers.Dense(64, activation="relu")(hidden)
    return keras.Model([variables, station], keras.layers.Dense(1)(hidden))


def estimator(options: argparse.Namespace) -> KerasEstimator:
    """What to train, and how."""
    keras.utils.set_random_seed(options.seed)
    return KerasEstimator(
        num_proc=options.workers,
        model=model(),
        optimizer=keras.optimizers.Adam(RATE),
        loss="mse",
        metrics=["mae"],
        feature_cols=[VARIABLES, "station"],
        label_cols=["y"],
        validation=0.1,
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=[keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.4, patience=0)],
        random_seed=options.seed,
    )


def picture(history: Sequence[dict[str, Any]]) -> str:
    """A line for each epoch, with a bar for the error of the validation, the root of its loss."""
    errors = [math.sqrt(record["validation"]["loss"]) for record in history]
    lines = []
    for record, error in zip(history, errors, strict=True):
        bar = "#" * round(BAR * error / max(errors))
        training, absolute = math.sqrt(record["train"]["loss"]), record["validation"]["all_metrics"]["mae"]
        told = f"training {training:.4f}   validation {error:.4f} {bar:{BAR}}   mean absolute error {absolute:.4f}"
        lines.append(f"epoch {record['epoch'] + 1:2}   {told}")
    return "\n".join(lines)


def main() -> None:
    """Start Spark, fit, transform the rows of the test, and print scores and history."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("hvd_cluster.spark.estimators").setLevel(logging.INFO)  # a line for each epoch
    parser = argparse.ArgumentParser(description="A regression with two inputs by an estimator for Keras.")
    add_spark_options(parser)
    parser.add_argument("--rows", type=positive, default=80_000, help="of the table (%(default)s)")
    parser.add_argument("--epochs", type=positive, default=9, help="passes over the rows (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=256, help="of each worker (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    options = parser.parse_args()
    with session(options.master) as spark:
        table = read(spark, options.rows, options.seed)
        fitted = estimator(options).fit(table.where("not test").drop("test")).setOutputCols(["predicted"])
        print(picture(fitted.getHistory()))
        scored = fitted.transform(table.where("test"))
        scored.select("station", "x1", "x2", "x3", "x4", "x5", "y", "predicted").show(5)
        error = RegressionEvaluator(labelCol="y", predictionCol="predicted").evaluate(scored)
    if error > GOOD:
        sys.exit(f"test error: {error:.4f}, more than {GOOD}; give more --rows or more --epochs")
    print(f"test error: {error:.4f}")


if __name__ == "__main__":
    main()
