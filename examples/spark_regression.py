"""Learn a function of ten variables from a table that Spark generates: ``python examples/spark_regression.py``.

The function is the first of Friedman's (Multivariate adaptive regression splines, 1991), of which five variables are
only there to mislead, with noise of a standard deviation of 1 upon it. Nobody can predict better than that: how near a
small network gets is what the lines show. In the end Spark asks it about rows that it has not seen, in an Arrow UDF.

The rows go to the ranks in batches of NumPy, torch or TensorFlow, here of torch; the first epoch trains while Spark is
still generating. A rank that is through with its rows calls ``hvd.join()``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import digits
import numpy as np
import pyarrow as pa
import torch
from digits import compare, fingerprint, positive
from pyspark.sql import DataFrame, SparkSession, functions
from spark_digits import add_spark_options, session
from torch import Tensor, nn

import hvd_cluster.torch as hvd
from hvd_cluster.spark import Shard, run_on_dataframe

VARIABLES = [f"x{number}" for number in range(1, 11)]
GOOD = 1.1
RATE = 0.005


def generate(spark: SparkSession, rows: int, seed: int) -> DataFrame:
    """A row for each point: ten variables between 0 and 1, the value with its noise, and whether it is held out."""
    variables = [functions.rand(seed + number).cast("float").alias(name) for number, name in enumerate(VARIABLES)]
    noise = functions.randn(seed + len(VARIABLES)).alias("noise")
    held_out = (functions.col("id") % 10 == 0).alias("held_out")
    value = "10 * sin(pi() * x1 * x2) + 20 * pow(x3 - 0.5, 2) + 10 * x4 + 5 * x5 + noise"
    table = spark.range(rows).select(*variables, noise, held_out)
    return table.withColumn("y", functions.expr(f"float({value})")).drop("noise")


def model() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(len(VARIABLES), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def train(shard: Shard, epochs: int, seed: int) -> tuple[str, dict[str, Tensor]]:
    """Runs on every rank; returns the fingerprint of its network and the parameters."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = model()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(network.parameters(), lr=RATE * hvd.size())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)

    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        for variables, values in shard.torch():
            optimizer.zero_grad()
            nn.functional.mse_loss(network(variables).squeeze(1), values).backward()
            optimizer.step()
        last = hvd.join()
        seconds = time.perf_counter() - start
        hvd.broadcast_parameters(network.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        schedule.step()
        error, rows = evaluate(network, shard), hvd.allreduce(torch.tensor(shard.rows), op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch}   held-out error {error:.4f}   {int(rows) / seconds:9,.0f} rows/s", flush=True)
    return fingerprint(network), network.state_dict()


@torch.no_grad()
def evaluate(network: nn.Module, shard: Shard) -> float:
    """The root of the mean squared error on the held-out rows of all ranks."""
    squares = torch.zeros(2)
    for variables, values in shard.torch().validation or ():
        errors = network(variables).squeeze(1) - values
        squares += torch.tensor([errors.square().sum(), len(errors)])
    squares = hvd.allreduce(squares, name="squares", op=hvd.Sum)
    return math.sqrt(squares[0] / squares[1])


def score(table: DataFrame, parameters: dict[str, Tensor]) -> DataFrame:
    """``table`` with a column ``predicted``."""

    @functions.arrow_udf("float")
    def predict(*columns: pa.Array) -> pa.Array:
        torch.set_num_threads(1)
        network = model()
        network.load_state_dict(parameters)
        with torch.no_grad():
            variables = torch.from_numpy(np.column_stack([column.to_numpy() for column in columns]))
            return pa.array(network(variables).squeeze(1).numpy())

    return table.withColumn("predicted", predict(*VARIABLES))


def main() -> None:
    """Start Spark, train, let Spark score the held-out rows, and print the result."""
    parser = argparse.ArgumentParser(description="Learn a function of ten variables from a table of Spark.")
    add_spark_options(parser)
    parser.add_argument("--rows", type=positive, default=500_000, help="of the table (%(default)s)")
    parser.add_argument("--epochs", type=positive, default=5, help="passes over the rows (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=256, help="of each rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    options = parser.parse_args()
    with session(options.master) as spark:
        spark.addArtifacts(digits.__file__, pyfile=True)  # the ranks import it, too
        table = generate(spark, options.rows, options.seed)
        results = run_on_dataframe(
            train,
            table,
            args=(options.epochs, options.seed),
            num_proc=options.workers,
            feature_cols=VARIABLES,
            label_cols="y",
            validation="held_out",
            batch_size=options.batch_size,
            seed=options.seed,
        )
        print(compare([mark for mark, _ in results]))
        scored = score(table.where("held_out"), results[0][1])
        scored.select("x1", "x2", "x3", "x4", "x5", "y", "predicted").show(5)
        error = scored.select(functions.sqrt(functions.avg(functions.expr("pow(predicted - y, 2)")))).first()[0]
    if error > GOOD:
        sys.exit(f"held-out error: {error:.4f}, more than {GOOD}; give more --epochs or --rows")
    print(f"held-out error: {error:.4f}; the noise alone makes 1.0")


if __name__ == "__main__":
    main()
