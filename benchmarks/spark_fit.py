"""A network fitted to a DataFrame: TorchEstimator, run_on_dataframe by hand, and Parquet files under TorchDistributor.

    python -m benchmarks.spark_fit

2 million rows of 28 float columns, one of them the label: random numbers, which Spark has written into Parquet files
beforehand. Each side reads that DataFrame and trains the same small network, 27-64-64-1, by SGD, on the two executors
of one ``local-cluster[2,1,1024]``, and says the loss of each epoch.

* ours: ``TorchEstimator.fit``;
* by hand: ``hvd_cluster.spark.run_on_dataframe`` with a loop of the user;
* DataLoader: Spark writes the DataFrame to the local disk, and PySpark's TorchDistributor starts a loop with
  ``DistributedDataParallel``, where each rank reads its half of the files into a TensorDataset for a DataLoader;
* batches: the same, with an IterableDataset that gives whole batches of shuffled rows, as fast as one can write it.

A fit counts from the call of a side to where it has the trained weights, the first epoch from that call to its end. All
sides must come to the same loss. Before all that each side has had some rows. In four launches each side comes once
after each other one: Spark ends a Python worker that has nothing to do for a minute, so a side that does not need one
makes the next side slower.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.measure import Row, add_launches_argument, add_report_arguments, combine, report
from benchmarks.spark_ingest import COLUMNS, LABEL, RANKS, WARM_UP_ROWS, folder, generate, spark_on

PEERS = ("by hand", "DataLoader", "batches")
FEATURES = [f"c{number}" for number in range(COLUMNS - 1)]
LR = 0.01
WILLIAMS = (0, 1, 3, 2)
"""In the square of orders that it begins, each side follows each other one once (E. J. Williams, 1949)."""

Fit: TypeAlias = "tuple[list[float], list[float]]"
"""When each epoch ended, by a clock that all processes of the machine share, and its loss."""


def network() -> Any:
    """The same weights in each process."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(COLUMNS - 1, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))


def ours(spark: Any, table: Any, arguments: argparse.Namespace) -> Fit:
    """TorchEstimator.fit"""
    import torch

    from hvd_cluster.spark.torch import FitCallback, TorchEstimator

    class Clock(FitCallback):
        """Notes the end of each epoch in a file."""

        def on_epoch_end(self, epoch: int, history: Any) -> None:
            with open(path, "a") as file:
                file.write(f"{time.monotonic()}\n")

    with folder() as place:
        path = str(place / "ends")
        model = network()
        fitted = TorchEstimator(
            num_proc=RANKS,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LR / RANKS),  # the estimator multiplies it
            loss=torch.nn.functional.mse_loss,
            feature_cols=[FEATURES],
            label_cols=[LABEL],
            batch_size=arguments.batch_size,
            epochs=arguments.epochs,
            callbacks=[Clock()],
            verbose=0,
        ).fit(table)
        ends = sorted(map(float, Path(path).read_text().split()))  # those of both ranks
        return ends[RANKS - 1 :: RANKS], [record["train"]["loss"] for record in fitted.getHistory()]


def by_hand(spark: Any, table: Any, arguments: argparse.Namespace) -> Fit:
    """run_on_dataframe"""
    from hvd_cluster.spark import run_on_dataframe

    results: list[Fit] = run_on_dataframe(
        train_by_hand,
        table,
        args=(arguments.epochs,),
        num_proc=RANKS,
        feature_cols=FEATURES,
        label_cols=[LABEL],
        batch_size=arguments.batch_size,
        shuffle=True,
    )
    return results[0]


def train_by_hand(shard: Any, epochs: int) -> Fit:
    """Runs on every rank."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def average(loss: torch.Tensor) -> float:
        hvd.join()
        return float(hvd.allreduce(loss))

    return loop(model, optimizer, epochs, shard.torch, average)


def loop(model: Any, optimizer: Any, epochs: int, batches: Callable[[], Iterable[Any]], average: Any) -> Fit:
    """The loop of all sides but ours. ``average`` is over the ranks."""
    import torch

    ends, losses = [], []
    for _ in range(epochs):
        total, rows = 0.0, 0
        for features, labels in batches():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features), labels.reshape(-1, 1))
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(labels)
            rows += len(labels)
        losses.append(average(torch.tensor(total / rows)))
        ends.append(time.monotonic())
    return ends, losses


def data_loader(spark: Any, table: Any, arguments: argparse.Namespace, whole_batches: bool = False) -> Fit:
    """TorchDistributor over Parquet files."""
    from pyspark.ml.torch.distributor import TorchDistributor

    with folder() as place:
        table.write.mode("overwrite").parquet(str(place))
        files = sorted(map(str, place.glob("*.parquet")))
        distributor = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
        found: Fit = distributor.run(train_from_files, files, arguments.batch_size, arguments.epochs, whole_batches)
        return found


def train_from_files(files: list[str], batch_size: int, epochs: int, whole_batches: bool) -> Fit:
    """Runs on every rank of TorchDistributor."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    own = files[dist.get_rank() :: dist.get_world_size()]
    make = batch_loader if whole_batches else row_loader
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = make(own, batch_size)

    def average(loss: torch.Tensor) -> float:
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    try:
        return loop(model, optimizer, epochs, lambda: loader, average)
    finally:
        dist.destroy_process_group()


def tensors(files: list[str]) -> tuple[Any, Any]:
    """Features and labels of all rows in ``files``."""
    import numpy
    import pyarrow.parquet
    import torch

    columns = [column.to_numpy() for column in pyarrow.parquet.read_table(files).columns]
    matrix = torch.from_numpy(numpy.column_stack(columns))
    return matrix[:, :-1], matrix[:, -1]


def row_loader(files: list[str], batch_size: int) -> Any:
    """As PyTorch's tutorials have it."""
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(*tensors(files)), batch_size=batch_size, shuffle=True)


def batch_loader(files: list[str], batch_size: int) -> Any:
    """Whole batches by one index operation each, in a new order in each epoch."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    features, labels = tensors(files)

    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for rows in torch.randperm(len(labels)).split(batch_size):
                yield features[rows], labels[rows]

    return DataLoader(Batches(), batch_size=None)


SIDES: dict[str, Callable[[Any, Any, argparse.Namespace], Fit]] = {
    "ours": ours,
    "by hand": by_hand,
    "DataLoader": data_loader,
    "batches": lambda *given: data_loader(*given, whole_batches=True),
}


def launch(spark: Any, table: Any, arguments: argparse.Namespace, first: int) -> list[Row]:
    """Each side once, from number ``first`` on; rows/s of all ranks together."""
    speeds: dict[str, dict[str, float]] = {}
    losses = {}
    names = list(SIDES)
    for name in (names[(first + step) % len(names)] for step in WILLIAMS):
        called = time.monotonic()
        ends, losses[name] = SIDES[name](spark, table, arguments)
        speeds[name] = rows_per_second(called, ends, time.monotonic(), arguments)
    last = [each[-1] for each in losses.values()]
    if len(set(map(len, losses.values()))) != 1 or max(last) > 1.05 * min(last):
        raise RuntimeError(f"the sides do not come to the same loss: {json.dumps(losses)}")
    mine = speeds["ours"]
    return [
        Row(f"{case}; {peer}", RANKS, "rows/s", speed, speeds[peer][case], speed)
        for peer in PEERS
        for case, speed in mine.items()
    ]


def rows_per_second(called: float, ends: list[float], end: float, arguments: argparse.Namespace) -> dict[str, float]:
    """By case."""
    rows = arguments.rows
    return {
        f"fit of {arguments.epochs} epochs": arguments.epochs * rows / (end - called),
        "first epoch, with the start": rows / (ends[0] - called),
        "later epochs": rows / median(later - earlier for earlier, later in pairwise(ends)),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the DataFrame (default: 2000000)")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows a rank and batch (default: 1024)")
    parser.add_argument("--epochs", type=int, default=3, help="at least 2 (default: 3)")
    add_launches_argument(parser, 4)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    with folder() as place, spark_on(place) as spark:
        few = argparse.Namespace(**vars(arguments) | {"rows": WARM_UP_ROWS})
        launch(spark, generate(spark, place / "few", few.rows), few, 0)
        table = generate(spark, place / "table", arguments.rows)
        launches = [launch(spark, table, arguments, first) for first in range(arguments.launches)]
    rows = [combine(entries) for entries in zip(*launches, strict=True)]
    report("a network fitted to a DataFrame", rows, arguments)


if __name__ == "__main__":
    from benchmarks.spark_fit import main as importable_main

    importable_main()
