"""Learn handwritten digits from a Spark DataFrame: ``python examples/spark_digits.py``.

The network is that of ``digits.py``, but the images are rows of a DataFrame, which go straight from Spark's partitions
to the ranks. Their shares may differ in size: a rank that is through calls ``hvd.join()``, as in ``digits_uneven.py``.
In the end Spark asks the trained network about images that it has not seen, in a pandas UDF.

It starts Spark on this machine; ``--master`` names a cluster that runs already.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import digits
import numpy as np
import pandas as pd
import torch
from digits import RATE, add_options, compare, fingerprint, model, positive, step
from pyspark.sql import DataFrame, SparkSession, functions
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hvd_cluster.torch as hvd
from hvd_cluster.spark import Shard, run_on_dataframe

GOOD = 0.95
BAR = 40


def train(shard: Shard, epochs: int, seed: int) -> tuple[str, dict[str, Tensor]]:
    """Runs on every rank; returns the fingerprint of its network and the parameters."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=RATE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)

    for epoch in range(1, epochs + 1):
        for pixels, labels in shard.torch():
            step(network, optimizer, images(pixels), labels.long())
        last = hvd.join()  # returns on all ranks at once, and names the rank that had most to do
        hvd.broadcast_parameters(network.state_dict(), root_rank=last)  # the others have missed its last steps
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        accuracy, rows = evaluate(network, shard), hvd.allgather_object(shard.rows)
        if hvd.rank() == 0:
            print(f"epoch {epoch:2}   rows by rank {rows}   held-out accuracy {accuracy:.4f}", flush=True)
    return fingerprint(network), network.state_dict()


def images(pixels: Tensor) -> Tensor:
    """Rows of 64 pixels from 0 to 16 as images with one channel from 0 to 1."""
    return pixels.view(-1, 1, 8, 8) / 16


@torch.no_grad()
def evaluate(network: nn.Module, shard: Shard) -> float:
    """The share of the held-out images that the network gets right; each rank looks at its own."""
    right = torch.zeros(2)
    for pixels, labels in shard.torch().validation or ():
        hits = network(images(pixels)).argmax(dim=1) == labels
        right += torch.tensor([hits.sum(), len(hits)])
    right = hvd.allreduce(right, name="right", op=hvd.Sum)
    return float(right[0] / right[1])


def read(spark: SparkSession) -> DataFrame:
    """A row for each image: its pixels, its digit, and whether it is held out."""
    bunch = load_digits()
    table = pd.DataFrame({"pixels": list(bunch.data.astype("float32")), "digit": bunch.target})
    table["held_out"] = table.index % 5 == 0
    return spark.createDataFrame(table, "pixels array<float>, digit int, held_out boolean")


def score(table: DataFrame, parameters: dict[str, Tensor]) -> DataFrame:
    """``table`` with a column ``read_as``: which digit the network with these parameters sees in the pixels."""

    @functions.pandas_udf("int")
    def read_as(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        torch.set_num_threads(1)
        network = model()
        network.load_state_dict(parameters)
        for pixels in batches:
            with torch.no_grad():
                guesses = network(images(torch.from_numpy(np.stack(pixels)))).argmax(dim=1)
            yield pd.Series(guesses.numpy())

    return table.withColumn("read_as", read_as("pixels"))


def tell(scored: DataFrame) -> float:
    """Print for each digit the number of correct predictions and the wrong ones; returns the accuracy."""
    seen = scored.groupBy("digit", "read_as").count().toPandas()
    right = seen[seen["digit"] == seen["read_as"]]
    for digit, counts in seen.groupby("digit"):
        hits, total = counts[counts["read_as"] == digit]["count"].sum(), counts["count"].sum()
        wrong = counts[counts["read_as"] != digit].sort_values("count", ascending=False)
        taken_for = ", ".join(f"{row.count} as {row.read_as}" for row in wrong.itertuples(index=False, name="Row"))
        bar = "#" * round(BAR * hits / total)
        print(f"digit {digit}   {hits:3} of {total:3}   {bar:{BAR}}   {taken_for}".rstrip())
    return float(right["count"].sum() / seen["count"].sum())


@contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """A session, on this machine unless ``master`` says otherwise."""
    if not shutil.which("java") and "JAVA_HOME" not in os.environ:
        sys.exit("Spark needs Java 17: apt-get install openjdk-17-jre-headless")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would take the python3 that it finds first
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings: dict[str, Any] = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master(master).config(map=settings).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def add_spark_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where to train."""
    parser.add_argument("--master", default="local[2]", help="Spark's master (%(default)s)")
    parser.add_argument("--workers", type=positive, default=2, help="number of workers (%(default)s)")


def main() -> None:
    """Start Spark, train, let Spark score the held-out rows, and print the result."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits from a Spark DataFrame.")
    add_spark_options(parser)
    add_options(parser)
    options = parser.parse_args()
    with session(options.master) as spark:
        spark.addArtifacts(digits.__file__, pyfile=True)  # the ranks import it, too
        table = read(spark)
        results = run_on_dataframe(
            train,
            table,
            args=(options.epochs, options.seed),
            num_proc=options.workers,
            feature_cols="pixels",
            label_cols="digit",
            validation="held_out",
            batch_size=options.batch_size,
            seed=options.seed,
        )
        print(compare([mark for mark, _ in results]))
        accuracy = tell(score(table.where("held_out"), results[0][1]))
    if accuracy < GOOD:
        sys.exit(f"held-out accuracy: {accuracy:.4f}, less than {GOOD}; give more --epochs")
    print(f"held-out accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
