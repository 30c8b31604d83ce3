"""run_on_dataframe() in two executors of Spark: from partitions to batches."""

import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import SparseVector, Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from executors.api import RemoteError
from hvd_cluster.spark import run, run_on_dataframe

# Spark keeps its own processes and connections.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.leaves("descriptors", "processes")]


def ids(shard, epochs=3):
    """The labels of each epoch; in the workers."""
    return [[int(label) for _, labels in shard for label in labels] for _ in range(epochs)]


def both(results, epoch):
    return sorted(label for shard in results for label in shard[epoch])


def test_every_row_comes_once_an_epoch_whatever_its_columns(spark):
    def check(shard, factor):
        import numpy as np

        found = []
        for _ in range(3):
            found.append([])
            for (scalars, arrays, vectors), labels in shard:
                assert (scalars.dtype, arrays.dtype, vectors.dtype) == (np.float32, np.float32, np.float64)
                assert np.array_equal(scalars, np.stack([labels, labels * factor, labels * 2], axis=1))
                assert np.array_equal(arrays, np.stack([labels, labels + 1], axis=1))
                assert np.array_equal(vectors, np.stack([labels, labels * 0, labels, labels * 0.5], axis=1))
                found[-1] += labels.tolist()
        return found

    def number(factor, kind="float"):
        return (F.col("id") * factor).cast(kind)

    df = spark.range(1000).select(
        number(1).alias("a.b"),
        number(3).alias("c`d"),
        number(2).alias("A.B"),
        F.array(number(1), (F.col("id") + 1).cast("float")).alias("pair"),
        array_to_vector(F.array(number(1, "double"), number(0, "double"), number(1, "double"))).alias("v"),
        number(0.5, "decimal(10, 1)").alias("half"),
        "id",
    )
    features = [["a.b", "c`d", "A.B"], "pair", ["v", "half"]]
    results = run_on_dataframe(check, df, (3,), num_proc=2, feature_cols=features, label_cols="id", batch_size=32)
    assert [both(results, epoch) for epoch in range(3)] == [list(range(1000))] * 3
    assert all(len({tuple(epoch) for epoch in shard}) == 3 for shard in results)


def test_vectors_dense_and_sparse(spark):
    def sums(shard):
        rows = (row for features, labels in shard for row in zip(features, labels, strict=True))
        return [(int(label), vector.tolist()) for vector, label in rows]

    rows = [(0, Vectors.dense(1.0, 0.0, 2.0)), (1, SparseVector(3, {1: 5.0})), (2, SparseVector(3, {}))]
    schema = StructType([StructField("id", LongType()), StructField("v", VectorUDT())])
    df = spark.createDataFrame(rows, schema)
    results = run(sums, num_proc=2, df=df, label_cols="id")
    assert sorted(results[0] + results[1]) == [(0, [1, 0, 2]), (1, [0, 5, 0]), (2, [0, 0, 0])]


def test_strings_and_binary_data(spark):
    def check(shard):
        import hashlib

        found = []
        for _ in range(2):
            found.append([])
            for (texts, data), labels in shard:
                rows = labels.tolist()
                assert texts.tolist() == [["z\u00fcrich" * (row % 3), f"{row}"] for row in rows]
                assert data.tolist() == [hashlib.md5(b"%d" % row).digest() * (row % 5) for row in rows]
                found[-1] += rows
        return found

    number = F.col("id").cast("string")
    df = spark.range(0, 1000, 1, 2).filter("id < 500")  # the other partition is empty
    df = df.select(
        F.repeat(F.lit("z\u00fcrich"), (F.col("id") % 3).cast("int")).alias("text"),
        number.alias("number"),
        F.unhex(F.repeat(F.md5(number.cast("binary")), (F.col("id") % 5).cast("int"))).alias("data"),
        "id",
    )
    features = [["text", "number"], "data"]
    results = run_on_dataframe(check, df, num_proc=2, feature_cols=features, label_cols="id", batch_size=32)
    assert [both(results, epoch) for epoch in range(2)] == [list(range(500))] * 2
    assert results[1] == [[], []]


def train(shard):
    """Some steps on batches of different numbers; the steps of this rank, and what all agree about in the end."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    steps = 0
    for _ in range(2):
        for features, labels in shard.torch():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features[:, None].float() / 100), labels[:, None].float()).backward()
            optimizer.step()
            steps += 1
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    validation = len(shard.validation) if shard.validation else None
    return shard.rows, len(shard), steps, last, model.weight.item(), validation


@pytest.mark.parametrize(("rows", "uneven"), [(206, [169, 37]), (100, [100, 0])])
def test_uneven_and_empty_shards_with_join(spark, rows, uneven):
    """A filter leaves partitions as they are, and Spark takes them so."""
    pytest.importorskip("torch")
    df = spark.range(0, 338, 1, 2).filter(F.col("id") < rows).withColumn("y", F.col("id") * 2)
    results = run_on_dataframe(train, df, num_proc=2, label_cols="y", feature_cols="id", batch_size=16)
    assert sorted((result[0] for result in results), reverse=True) == uneven
    assert [result[1:3] for result in results] == [(-(-count // 16), 2 * -(-count // 16)) for count, *_ in results]
    assert len({result[3:] for result in results}) == 1


def test_all_rows_in_one_partition(spark, caplog):
    """A warning tells the numbers; ``repartition`` distributes the rows."""
    df = spark.range(0, 2000, 1, 2).filter("id < 1000").withColumn("x", F.col("id") * 2)
    counts = run_on_dataframe(lambda shard: shard.rows, df, num_proc=2, label_cols="id")
    assert counts == [1000, 0]
    [warning] = [record.getMessage() for record in caplog.records if "different numbers of rows" in record.getMessage()]
    assert "1000 on rank 0, 0 on rank 1" in warning
    caplog.clear()
    counts = run_on_dataframe(lambda shard: shard.rows, df, num_proc=2, label_cols="id", repartition=True)
    assert counts == [500, 500]
    assert "different numbers of rows" not in caplog.text


def test_weights(spark):
    def weighted(shard):
        return [(int(y), float(w)) for _, labels, weights in shard for y, w in zip(labels, weights, strict=True)]

    df = spark.range(100).withColumn("x", F.col("id") * 2).withColumn("w", F.col("id") / 4)
    results = run_on_dataframe(weighted, df, num_proc=2, label_cols="id", sample_weight_col="w")
    assert sorted(results[0] + results[1]) == [(number, number / 4) for number in range(100)]


def test_validation(spark):
    def split(shard):
        return ids(shard, 1)[0], ids(shard.validation, 2)

    df = spark.range(1000).withColumn("kept", F.col("id") % 10 == 3).withColumn("x", F.col("id").cast("double"))
    by_column = run_on_dataframe(split, df, num_proc=2, label_cols="id", validation="kept")
    assert sorted(by_column[0][0] + by_column[1][0]) == [number for number in range(1000) if number % 10 != 3]
    assert all(first == second for _, (first, second) in by_column)
    assert both([kept for _, kept in by_column], 0) == list(range(3, 1000, 10))
    by_chance = run_on_dataframe(split, df.drop("kept"), num_proc=2, label_cols="id", validation=0.1)
    kept = both([kept for _, kept in by_chance], 0)
    assert 50 < len(kept) < 150
    assert sorted(by_chance[0][0] + by_chance[1][0] + kept) == list(range(1000))


def test_nulls_fail_the_run(spark):
    df = spark.range(0, 100, 1, 2).withColumn("x", F.when(F.col("id") < 97, F.lit(1.0)))
    with pytest.raises(ValueError, match=r"column 'x' has nulls, first in the row \(x=None, id=97\)") as caught:
        run_on_dataframe(ids, df, num_proc=2, label_cols="id")
    assert isinstance(caught.value.__cause__, RemoteError)


def test_a_function_may_leave_rows_unread(spark):
    df = spark.range(200_000).withColumn("x", F.rand(0))
    assert run_on_dataframe(lambda shard: None, df, num_proc=2, label_cols="id") == [None, None]
    assert run_on_dataframe(lambda shard: next(iter(shard))[0].shape, df, num_proc=2, label_cols="id") == [(32, 1)] * 2


def test_an_error_of_the_function_comes_through(spark):
    def fail(shard):
        for _ in shard:
            raise LookupError("in the loop")

    df = spark.range(200_000).withColumn("x", F.rand(0))
    with pytest.raises(LookupError, match="in the loop"):
        run_on_dataframe(fail, df, num_proc=2, label_cols="id")


def test_refused_before_anything_starts(spark):
    df = spark.range(10).withColumn("name", F.lit("a"))
    with pytest.raises(ValueError, match="label_cols has the column 'name', which is of type string; index it first"):
        run_on_dataframe(ids, df, label_cols="name")
    with pytest.raises(ValueError, match="label_cols names 'y'"):
        run(ids, df=df.drop("name").withColumn("x", F.col("id")), label_cols="y")
    with pytest.raises(TypeError, match=r"run\(\) got label_cols, but no df"):
        run(ids, label_cols="y")
    with pytest.raises(TypeError, match="3 is not a function"):
        run_on_dataframe(3, df.withColumn("name", F.lit(1)), label_cols="id")


def test_arrays_of_other_sizes_on_other_ranks(spark):
    numbers = spark.range(0, 100, 1, 2)
    pair, triple = (F.array_repeat(F.col("id").cast("float"), size) for size in (2, 3))
    uneven = numbers.withColumn("x", F.when(F.col("id") < 50, pair).otherwise(triple))
    text = "column 'x' has 2 elements in the rows of rank 0, but 3 in those of rank 1; all rows must have the same"
    with pytest.raises(ValueError, match=text) as caught:
        run_on_dataframe(ids, uneven, num_proc=2, label_cols="id")
    assert isinstance(caught.value.__cause__, RemoteError)
    on_one = run_on_dataframe(ids, uneven.filter("id < 50"), num_proc=2, label_cols="id", shuffle=False)
    assert on_one == [[list(range(50))] * 3, [[]] * 3]
