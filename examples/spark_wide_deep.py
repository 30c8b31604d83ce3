"""A wide-and-deep recommender with sparse gradients, on a DataFrame: ``python examples/spark_wide_deep.py``.

Spark makes a table of visits: which user saw which item at which hour, for which price, and whether there was a click.
The wide part of the network remembers each pair of genre and hour. The deep part has an embedding of each user and
item, from which a small network learns who likes what. A batch has few of the users and items, so the embeddings are
``sparse=True``: only the rows of the batch travel, and only they are updated. The last line tells how many bytes that
saves.

The rows go straight from Spark's partitions to the ranks. It starts Spark on this machine; ``--master`` names a cluster
that runs already.
"""

from __future__ import annotations

import argparse
import time

import digits
import spark_digits
import torch
from digits import positive
from pyspark.sql import DataFrame, SparkSession, functions
from sklearn.metrics import roc_auc_score
from spark_digits import add_spark_options, session
from torch import Tensor, nn

import hvd_cluster.torch as hvd
from hvd_cluster.spark import Shard, run_on_dataframe

USERS, ITEMS, GENRES, HOURS = 2000, 500, 8, 24
FEATURES = [["user", "item", "genre", "hour"], ["price"]]


def visits(spark: SparkSession, rows: int, seed: int) -> DataFrame:
    """A row for each visit, with the probability of a click that nobody knows but this function."""
    table = spark.range(rows).select(
        functions.expr(f"int({USERS} * pow(rand({seed}), 2)) as user"),  # some come more often than others
        functions.expr(f"int({ITEMS} * pow(rand({seed + 1}), 2)) as item"),
        functions.expr(f"int({HOURS} * rand({seed + 2})) as hour"),
        functions.expr(f"float(randn({seed + 3})) as price"),
        (functions.col("id") % 10 == 0).alias("held_out"),
    )
    table = table.withColumn("genre", functions.expr(f"int(pmod(hash(item), {GENRES}))"))
    likes = f"pmod(hash(pmod(hash(user), {GENRES}), genre), 1000) / 1000"  # eight kinds of users
    habit = "pmod(hash(genre, hour), 1000) / 1000"
    table = table.withColumn("chance", functions.expr(f"1 / (1 + exp(4 + price / 2 - 5 * {likes} - 3 * {habit}))"))
    return table.withColumn("click", functions.expr(f"float(rand({seed + 4}) < chance)"))


class WideDeep(nn.Module):
    """The logarithm of the odds of a click."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wide = nn.Embedding(GENRES * HOURS, 1, sparse=True)
        self.users, self.items = nn.Embedding(USERS, width, sparse=True), nn.Embedding(ITEMS, width, sparse=True)
        self.deep = nn.Sequential(nn.Linear(2 * width + 1, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.wide, self.users, self.items):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, numbers: Tensor, price: Tensor) -> Tensor:
        """One value for each row."""
        user, item, genre, hour = numbers.long().unbind(dim=1)
        deep = self.deep(torch.cat([self.users(user), self.items(item), price], dim=1))
        return (self.wide(genre * HOURS + hour) + deep).squeeze(1)


def train(shard: Shard, epochs: int, seed: int) -> list[str]:
    """Runs on every rank; returns a line for each epoch, and one about the bytes of a step."""
    hvd.init()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that it does not check
    torch.manual_seed(seed)
    network, loss_of, lines = WideDeep(), nn.BCEWithLogitsLoss(), []
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)  # takes sparse gradients
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        for features, clicks in shard.torch():
            optimizer.zero_grad()
            loss_of(network(*features), clicks).backward()
            size = travels(network)
            optimizer.step()
        last = hvd.join()  # shards may have different numbers of batches
        hvd.broadcast_parameters(network.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        speed = hvd.allreduce(torch.tensor(shard.rows), op=hvd.Sum).item() / (time.perf_counter() - start)
        lines.append(f"epoch {epoch}   held-out AUC {evaluate(network, shard):.4f}   {speed:9,.0f} rows/s")
    dense = sum(parameter.nbytes for parameter in network.parameters())
    return [*lines, f"gradients of a step: {size:,} bytes, dense they would be {dense:,}"]


def travels(network: nn.Module) -> int:
    """The bytes of the gradients: of a sparse one, those of its rows and of their numbers."""
    gradients = [parameter.grad for parameter in network.parameters()]
    dense = sum(each.nbytes for each in gradients if not each.is_sparse)
    rows = [each.coalesce() for each in gradients if each.is_sparse]
    return dense + sum(each.values().nbytes + each.indices().nbytes for each in rows)


@torch.no_grad()
def evaluate(network: nn.Module, shard: Shard) -> float:
    """How often a click has a higher score than a visit without one, on the held-out rows of all ranks."""
    found = [torch.stack([network(*features), clicks], dim=1) for features, clicks in shard.torch().validation or ()]
    scores, clicks = hvd.allgather(torch.cat(found), name="scores").unbind(dim=1)
    return float(roc_auc_score(clicks, scores))


def draw(lines: list[str], best: float, path: str) -> None:
    """The AUC by epoch."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    values = [float(line.split()[4]) for line in lines]
    axes.plot(range(1, len(values) + 1), values, "o-", label="wide and deep")
    axes.axhline(best, color="black", lw=0.8, ls=":", label="who knows the true chances")
    axes.set(xlabel="epoch", ylabel="held-out AUC", xticks=range(1, len(values) + 1))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Start Spark, train, and print the results."""
    parser = argparse.ArgumentParser(description="A wide-and-deep recommender on a DataFrame.")
    add_spark_options(parser)
    parser.add_argument("--rows", type=positive, default=200_000, help="of the table (%(default)s)")
    parser.add_argument("--epochs", type=positive, default=5, help="passes over the rows (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=256, help="of each rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    parser.add_argument("--picture", metavar="FILE", help="draw the AUC into this file, such as recommender.svg")
    options = parser.parse_args()
    with session(options.master) as spark:
        for module in (digits, spark_digits):
            spark.addArtifacts(module.__file__, pyfile=True)  # the ranks import them, too
        table = visits(spark, options.rows, options.seed)
        *epochs, size = run_on_dataframe(
            train,
            table.drop("chance"),
            args=(options.epochs, options.seed),
            num_proc=options.workers,
            feature_cols=FEATURES,
            label_cols="click",
            validation="held_out",
            batch_size=options.batch_size,
            seed=options.seed,
        )[0]
        truth = table.where("held_out").select("click", "chance").toPandas()
    best = float(roc_auc_score(truth["click"], truth["chance"]))
    print(*epochs, f"who knows the true chances has {best:.4f}", size, sep="\n")
    if options.picture:
        draw(epochs, best, options.picture)


if __name__ == "__main__":
    main()
