"""Rows of a DataFrame into a training loop: run_on_dataframe, PySpark's TorchDistributor, and a detour through Parquet.

    python -m benchmarks.spark_ingest

2 million rows of 28 float columns, one of them the label, in two partitions: random numbers, which Spark has written
into Parquet files beforehand, so that nobody's time has their making in it. Each side reads that DataFrame, on the two
executors of one ``local-cluster[2,1,1024]``, and hands its batches to the same loop, which adds up the features:

* ours: ``hvd_cluster.spark.run_on_dataframe``, not shuffled, as no other side shuffles;
* TorchDistributor: ``_train_on_dataframe`` and ``_get_spark_partition_data_loader``, whose columns the loop stacks;
* Parquet: Spark writes the DataFrame to the local disk, ``hvd_cluster.spark.run`` starts ranks that read the files with
  pyarrow, a row group at a time.

The first epoch counts from the call of a side ("with the start"), and again from the moment when a rank asks for its
first batch ("alone"), later epochs from the end of the one before, to where the last rank has got to the end. The sums
of all sides must agree.
Before all that each side has had some rows, so that none pays for what the cluster does for the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.measure import Row, add_launches_argument, add_report_arguments, combine, report

ROOT = Path(__file__).parents[1]
CLUSTER = "local-cluster[2,1,1024]"
RANKS = 2
COLUMNS = 28
WARM_UP_ROWS = 20_000
LABEL = f"c{COLUMNS - 1}"
PEERS = ("TorchDistributor", "Parquet")

Batches: TypeAlias = Iterable[tuple[Any, Any]]
"""Features, float32 of (rows, COLUMNS - 1), and labels, as torch tensors."""


@dataclass(frozen=True)
class Epochs:
    """The record of one rank: when it asked for its first batch, when each epoch ended, and each one's rows and sum.

    Times are of a clock that all processes of the machine share, in seconds.
    """

    begin: float
    ends: list[float]
    rows: list[int]
    sums: list[float]


def consume(batches: Batches, epochs: int) -> Epochs:
    """The training loop, which touches every feature."""
    import torch

    torch.set_num_threads(1)
    seen = Epochs(time.monotonic(), [], [], [])
    for _ in range(epochs):
        rows, total = 0, torch.zeros((), dtype=torch.float64)
        for features, labels in batches:
            rows += len(labels)
            total += features.sum()
        seen.ends.append(time.monotonic())
        seen.rows.append(rows)
        seen.sums.append(float(total))
    return seen


def ours(spark: Any, table: Any, arguments: argparse.Namespace) -> list[Epochs]:
    """run_on_dataframe"""
    from hvd_cluster.spark import run_on_dataframe

    return run_on_dataframe(
        lambda shard, epochs: consume(shard.torch(), epochs),
        table,
        args=(arguments.epochs,),
        num_proc=RANKS,
        label_cols=LABEL,
        batch_size=arguments.batch_size,
        shuffle=arguments.shuffle,
    )


def torch_distributor(spark: Any, table: Any, arguments: argparse.Namespace) -> list[Epochs]:
    """TorchDistributor returns the result of rank 0 only, so the ranks leave theirs in files."""
    from pyspark.ml.torch.distributor import TorchDistributor

    with folder() as place:
        distributor = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
        given = str(place), arguments.rows // RANKS, arguments.batch_size, arguments.epochs
        distributor._train_on_dataframe(consume_partition, table, *given)
        return [Epochs(**json.loads(path.read_text())) for path in sorted(place.iterdir())]


def consume_partition(place: str, rows: int, batch_size: int, epochs: int) -> None:
    """Runs on every rank of TorchDistributor."""
    from pyspark.ml.torch.distributor import _get_spark_partition_data_loader

    batches = Stacked(_get_spark_partition_data_loader(rows, batch_size))
    (Path(place) / os.environ["RANK"]).write_text(json.dumps(vars(consume(batches, epochs))))


@dataclass(frozen=True)
class Stacked:
    """Batches of a loader that gives each column as a tensor of float64."""

    loader: Any

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        import torch

        for *features, labels in self.loader:
            yield torch.stack(features, dim=1).float(), labels.float()


def parquet(spark: Any, table: Any, arguments: argparse.Namespace) -> list[Epochs]:
    """Write, start ranks, read."""
    from hvd_cluster.spark import run

    with folder() as place:
        table.write.mode("overwrite").parquet(str(place))
        files = sorted(map(str, place.glob("*.parquet")))
        return run(consume_files, (files, arguments.batch_size, arguments.epochs), num_proc=RANKS)


def consume_files(files: list[str], batch_size: int, epochs: int) -> Epochs:
    """Runs on every rank of the side Parquet."""
    import hvd_cluster.torch as hvd

    hvd.init()
    return consume(ParquetFiles(files[hvd.rank() :: hvd.size()], batch_size), epochs)


@dataclass(frozen=True)
class ParquetFiles:
    """Batches of the rows in files. No batch crosses the end of a row group."""

    paths: list[str]
    batch_size: int

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        import numpy
        import torch
        from pyarrow.parquet import ParquetFile

        for path in self.paths:
            with ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    *features, labels = (column.to_numpy() for column in file.read_row_group(group).columns)
                    matrix = torch.from_numpy(numpy.column_stack(features))
                    yield from zip(
                        matrix.split(self.batch_size), torch.tensor(labels).split(self.batch_size), strict=True
                    )


SIDES: dict[str, Callable[[Any, Any, argparse.Namespace], list[Epochs]]] = {
    "ours": ours,
    "TorchDistributor": torch_distributor,
    "Parquet": parquet,
}


def launch(spark: Any, table: Any, arguments: argparse.Namespace) -> list[Row]:
    """Each side once; rows/s of all ranks together."""
    speeds: dict[str, dict[str, float]] = {}
    sums: dict[str, float] = {}
    for name, side in SIDES.items():
        called = time.monotonic()
        seen = side(spark, table, arguments)
        speeds[name] = rows_per_second(called, seen, arguments.rows)
        sums[name] = check(name, seen, arguments.rows)
    if max(sums.values()) - min(sums.values()) > 1.0:  # float32 sums of batches, in other orders
        raise RuntimeError(f"the sides saw different rows: their sums are {sums}")
    return [
        Row(f"{case}; {peer}", RANKS, "rows/s", speed, speeds[peer][case], speed)
        for peer in PEERS
        for case, speed in speeds["ours"].items()
    ]


def rows_per_second(called: float, seen: list[Epochs], rows: int) -> dict[str, float]:
    """By case."""
    ends = [max(times) for times in zip(*(rank.ends for rank in seen), strict=True)]
    later = [end - begin for begin, end in pairwise(ends)]
    return {
        "first epoch, with the start": rows / (ends[0] - called),
        "first epoch alone": rows / (ends[0] - min(rank.begin for rank in seen)),
        "later epochs": rows / median(later),
    }


def check(name: str, seen: list[Epochs], rows: int) -> float:
    """Every rank's every epoch had all rows; the sum of all features."""
    counts = [sum(counts) for counts in zip(*(rank.rows for rank in seen), strict=True)]
    if set(counts) != {rows}:
        raise RuntimeError(f"{name} saw {counts} rows instead of {rows}")
    return median(map(sum, zip(*(rank.sums for rank in seen), strict=True)))


@contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder."""
    path = Path(tempfile.mkdtemp(prefix="hvd-benchmark-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def spark_on(place: Path) -> Iterator[Any]:
    """A session with a cluster of its own, which keeps its files in ``place``."""
    from pyspark.sql import SparkSession

    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": python_path,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(place),
        "SPARK_LOCAL_DIRS": str(place),
    }
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    spark = SparkSession.builder.master(CLUSTER).config(map=settings).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def generate(spark: Any, place: Path, rows: int) -> Any:
    """The DataFrame; its rows are in files under ``place``."""
    from pyspark.sql import functions

    columns = [functions.rand(seed).cast("float").alias(f"c{seed}") for seed in range(COLUMNS)]
    spark.range(rows, numPartitions=RANKS).select(*columns).write.parquet(str(place))
    return spark.read.parquet(str(place))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the DataFrame (default: 2000000)")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows a rank and batch (default: 1024)")
    parser.add_argument("--epochs", type=int, default=3, help="at least 2 (default: 3)")
    parser.add_argument("--shuffle", action="store_true", help="our side shuffles")
    add_launches_argument(parser, 1)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    with folder() as place, spark_on(place) as spark:
        few = argparse.Namespace(**vars(arguments) | {"rows": min(arguments.rows, WARM_UP_ROWS)})
        launch(spark, generate(spark, place / "few", few.rows), few)
        table = generate(spark, place / "table", arguments.rows)
        launches = [launch(spark, table, arguments) for _ in range(arguments.launches)]
    rows = [combine(entries) for entries in zip(*launches, strict=True)]
    report("rows of a DataFrame into training", rows, arguments)


if __name__ == "__main__":
    from benchmarks.spark_ingest import main as importable_main

    importable_main()
