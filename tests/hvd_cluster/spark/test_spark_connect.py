"""Spark Connect: a client, which has no SparkContext, and a server in a process of its own."""

import pytest
from spark_cluster import CONNECT_SECONDS

pytestmark = pytest.mark.timeout(CONNECT_SECONDS + 20)

FUNCTIONS = """
import io, os
from executors.api import StartTimeoutError
from hvd_cluster.spark import run

def rank():
    print("hello")
    return int(os.environ["HOROVOD_RANK"])

def fail():
    if rank() == 1:
        raise KeyError("rank 1 has had enough")
    import time
    time.sleep(600)

def error_of(*arguments, **options):
    try:
        run(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)

output = io.StringIO()
result = {
    "ranks": run(rank, num_proc=2, stdout=output),
    "output": sorted(output.getvalue().splitlines()),
    "failure": error_of(fail, num_proc=2),
    "default": error_of(rank),
    "too many": error_of(rank, num_proc=3, start_timeout=2),
    "after": run(rank, num_proc=1),
}
"""


def test_a_client_of_spark_connect(result_of):
    result = result_of("functions")
    assert result["ranks"] == [0, 1]
    assert result["output"] == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert result["failure"] == ["KeyError", "'rank 1 has had enough'"]
    assert result["default"][0] == "ValueError"
    assert result["default"][1].startswith("num_proc must be given: only the server of Spark Connect knows")
    assert result["too many"][0] == "StartTimeoutError"
    assert result["too many"][1].startswith("0 of 3 workers started within 2 s")
    assert result["after"] == [0]


ROWS = """
from pyspark.sql import functions as F
from hvd_cluster.spark import run_on_dataframe

def ids(shard):
    return [[int(label) for _, labels in loader for label in labels] for loader in (shard, shard, shard.validation)]

# Partitions of 334, 66 and 0 rows.
numbers = spark.range(0, 1000, 1, 3).filter("id < 400").select("id", F.array("id", "id").alias("x"))

def shared(df, **options):
    return run_on_dataframe(ids, df, num_proc=2, label_cols="id", batch_size=16, **options)

result = {
    "column": shared(numbers.withColumn("kept", F.col("id") % 10 == 3), validation="kept"),
    "fraction": shared(numbers, validation=0.2),
}
"""


def test_rows_of_uneven_partitions(result_of):
    result = result_of("rows")
    for shards in result.values():
        assert all(sorted(first) == sorted(second) for first, second, _ in shards)
        assert sorted(label for first, _, kept in shards for label in first + kept) == list(range(400))
        assert min(len(first) for first, _, _ in shards) > 100
    assert sorted(label for _, _, kept in result["column"] for label in kept) == list(range(3, 400, 10))
    assert 40 < sum(len(kept) for _, _, kept in result["fraction"]) < 120


SLOW = """
import sys
from pathlib import Path
from executors.agents.spark.session import Session
from hvd_cluster.spark import run_on_dataframe

go, answers, busy = Path(sys.argv[1] + ".go"), [], Session.busy

def look(session, tag):
    answers.append(busy(session, tag))
    go.touch()
    return answers[-1]

def wait(batches):
    import time
    while not go.exists():
        time.sleep(0.05)
    yield from batches

Session.busy = look
df = spark.range(0, 100, 1, 2).mapInArrow(wait, "id long").selectExpr("id", "id * 2 as x")
rows = run_on_dataframe(lambda shard: shard.rows, df, num_proc=2, label_cols="id", start_timeout=10)
result = {"rows": sum(rows), "answers": answers}
"""


def test_the_start_timeout_does_not_count_while_rows_are_computed(result_of):
    """The stage before ours waits until the timeout is over and the server has said that its tasks run."""
    result = result_of("slow")
    assert result["rows"] == 100
    assert set(result["answers"]) == {True}


ESTIMATOR = """
import torch
from pyspark.sql import functions as F
from hvd_cluster.spark.torch import TorchEstimator

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
estimator = TorchEstimator(
    num_proc=2,
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loss=torch.nn.functional.mse_loss,
    feature_cols=[["a", "b"]],
    label_cols=["y"],
    validation="held_out",
    epochs=4,
    verbose=0,
)
df = spark.range(0, 400, 1, 3).withColumn("a", F.randn(1)).withColumn("b", F.randn(2))
df = df.withColumn("y", 2 * F.col("a") - F.col("b")).withColumn("held_out", F.col("id") % 5 == 0)
fitted = estimator.fit(df)
scored = fitted.setOutputCols(["found"]).transform(df)
result = {
    "history": [[record["epoch"], record["rows"], record["validation"]["loss"]] for record in fitted.getHistory()],
    "error": scored.agg(F.avg(F.abs(F.col("found") - F.col("y")))).collect()[0][0],
}
"""


def test_an_estimator(result_of):
    pytest.importorskip("torch")
    result = result_of("estimator")
    assert [(epoch, rows) for epoch, rows, _ in result["history"]] == [(epoch, 320) for epoch in range(4)]
    assert result["history"][-1][2] < result["history"][0][2]
    assert result["error"] < 0.1


CONNECT = {"functions": FUNCTIONS, "rows": ROWS, "slow": SLOW, "estimator": ESTIMATOR}
