"""Scores of a DataFrame's rows: a TorchModel's transform, predict_batch_udf by hand, and a model called for each row.

    python -m benchmarks.spark_transform

1 million rows of 28 float columns, random numbers, which Spark has written into Parquet files beforehand. Each side
adds the output of one small network, 28-64-64-1, as a column, on the two executors of one ``local-cluster[2,1,1024]``.
All columns of all rows go to Spark's sink "noop", which throws them away.

* ours: ``TorchModel.transform``;
* predict_batch_udf: PySpark's function, the 28 columns as one struct, the model from a broadcast variable;
* array: the same, with the 28 columns as one array, which Spark brings to the function as a matrix;
* row by row: as Horovod's estimators do it: partitions of ``df.rdd``, the model in the closure as base64 of a pickle,
  one call of the model for each row, and a DataFrame made of the rows. It gets fewer rows.

Rows/s count from the call of a side to the end of its job, so they have the way of the model in them. Before that each
side has had some rows, and the sums of all sides have agreed.
"""

from __future__ import annotations

import argparse
import base64
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.measure import Row, add_launches_argument, add_report_arguments, combine, report
from benchmarks.spark_ingest import WARM_UP_ROWS, folder, spark_on

COLUMNS = [f"c{number}" for number in range(28)]
PARTITIONS = 2
OUTPUT = "prediction"
PEERS = ("predict_batch_udf", "array", "row by row")


def network() -> Any:
    """The same weights in each process."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(28, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))


def ours(spark: Any, table: Any) -> Any:
    """TorchModel.transform"""
    from hvd_cluster.spark.torch import TorchModel

    model = TorchModel(
        model=network(), feature_columns=[COLUMNS], label_columns=["label"], _metadata={"label": "float"}
    )
    return model.setOutputCols([OUTPUT]).transform(table)


def by_hand(spark: Any, table: Any, matrix: bool) -> Any:
    """predict_batch_udf on a struct or an array of all columns."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions
    from pyspark.sql.types import FloatType

    shared = spark.sparkContext.broadcast(network())

    def make_predict() -> Callable[[Any], Any]:
        import torch

        torch.set_num_threads(1)
        model = shared.value.eval()

        def predict(inputs: Any) -> Any:
            with torch.inference_mode():
                return model(torch.tensor(inputs, dtype=torch.float32)).squeeze(1).numpy()

        return predict

    shapes = {"input_tensor_shapes": [[len(COLUMNS)]]} if matrix else {}
    udf = predict_batch_udf(make_predict, return_type=FloatType(), batch_size=8192, **shapes)
    together = functions.array(*COLUMNS) if matrix else functions.struct(*COLUMNS)
    return table.withColumn(OUTPUT, udf(together))


def row_by_row(spark: Any, table: Any) -> Any:
    """One call of the model for each row."""
    from pyspark.sql.types import FloatType, StructField, StructType

    text = base64.b64encode(pickle.dumps(network()))

    def predict(rows: Iterator[Any]) -> Iterator[Any]:
        import torch
        from pyspark.sql import Row as SparkRow

        model = pickle.loads(base64.b64decode(text)).eval()
        with torch.no_grad():
            for row in rows:
                values = row.asDict()
                inputs = torch.tensor([values[name] for name in COLUMNS]).reshape(-1, len(COLUMNS))
                yield SparkRow(**values, **{OUTPUT: float(model(inputs)[0])})

    schema = StructType([*table.schema.fields, StructField(OUTPUT, FloatType())])
    return spark.createDataFrame(table.rdd.mapPartitions(predict), schema)


SIDES: dict[str, Callable[[Any, Any], Any]] = {
    "ours": ours,
    "predict_batch_udf": lambda spark, table: by_hand(spark, table, matrix=False),
    "array": lambda spark, table: by_hand(spark, table, matrix=True),
    "row by row": row_by_row,
}


def launch(spark: Any, tables: dict[str, tuple[Any, int]]) -> list[Row]:
    """Each side once, with its table and its number of rows."""
    speeds = {}
    for name, side in SIDES.items():
        table, rows = tables[name]
        begin = time.monotonic()
        side(spark, table).write.format("noop").mode("overwrite").save()
        speeds[name] = rows / (time.monotonic() - begin)
    mine = speeds["ours"]
    return [Row(f"transform; {peer}", PARTITIONS, "rows/s", mine, speeds[peer], mine) for peer in PEERS]


def check(spark: Any, table: Any) -> None:
    """The sums of all sides agree."""
    sums = {name: side(spark, table).agg({OUTPUT: "sum"}).first()[0] for name, side in SIDES.items()}
    if max(sums.values()) - min(sums.values()) > 1e-3 * max(1.0, abs(sums["ours"])):
        raise RuntimeError(f"the sides give different scores: their sums are {sums}")


def generate(spark: Any, place: str, rows: int) -> Any:
    """The DataFrame; its rows are in files at ``place``."""
    from pyspark.sql import functions

    columns = [functions.rand(seed).cast("float").alias(name) for seed, name in enumerate(COLUMNS)]
    spark.range(rows, numPartitions=PARTITIONS).select(*columns).write.parquet(place)
    return spark.read.parquet(place)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the DataFrame (default: 1000000)")
    parser.add_argument("--single-rows", type=int, default=50_000, help="for the side row by row (default: 50000)")
    add_launches_argument(parser, 3)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    with folder() as place, spark_on(place) as spark:
        check(spark, generate(spark, f"{place}/few", WARM_UP_ROWS))
        few = generate(spark, f"{place}/single", arguments.single_rows), arguments.single_rows
        table = generate(spark, f"{place}/table", arguments.rows), arguments.rows
        tables = {name: few if name == "row by row" else table for name in SIDES}
        launches = [launch(spark, tables) for _ in range(arguments.launches)]
    report("scores of a DataFrame's rows", [combine(entries) for entries in zip(*launches, strict=True)], arguments)


if __name__ == "__main__":
    from benchmarks.spark_transform import main as importable_main

    importable_main()
