"""Keras models in two executors of Spark, on data of their own and on the rows of a DataFrame."""

from importlib.util import find_spec

import pytest
from pyspark.sql import functions as F

from hvd_cluster.spark import run, run_on_dataframe
from tests.hvd_cluster.keras.jobs import require_training, train, train_on_rows

# Spark keeps its own processes and connections.
pytestmark = [
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(240),
]


def test_keras_trains_in_executors(spark):
    require_training(run(train, (5,), num_proc=2))


def test_keras_trains_on_the_rows_of_a_dataframe(spark):
    x = (F.col("id") / 128 - 1).cast("float")
    df = spark.range(0, 256, 1, 2).select(x.alias("x"), (3 * x + 1).cast("float").alias("y"))
    require_training(run_on_dataframe(train_on_rows, df, (10,), num_proc=2, label_cols="y", batch_size=16))
