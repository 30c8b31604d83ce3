"""run_on_dataframe() with workers that come and go: which rows an epoch has once, twice, or never."""

import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import chain

import psutil
import pytest
from pyspark.sql import functions as F
from spark_cluster import eventually
from spark_training import SECONDS, Training, agent_of, decommissioned, executor_of

from executors.api import ExecutorError, RemoteError
from hvd_cluster import spark as hvd_spark

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.timeout(500),
]

ROWS, BATCH, GATE, EPOCHS = 200, 8, 5, 2


def train(shard, folder):
    """Stops before step GATE of the first epoch until the test lets it go on; returns the labels of each epoch."""
    import os
    from pathlib import Path

    import hvd_cluster.torch as hvd
    from hvd_cluster.ops.objects import allgather_object

    torch.set_num_threads(1)
    hvd.init()
    worker = os.environ["HOROVOD_WORKER_ID"]
    Path(folder, worker).write_text(f"{os.getpid()}")
    Path(folder, os.environ["HVD_CLUSTER_SPARK_PARTITION"]).write_text(worker)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, shard=shard, seen=[[] for _ in range(EPOCHS)])

    def wait_at_gate(state):
        while shard.epoch == 0 and shard.step == GATE:
            if all(allgather_object(Path(folder, "go").exists(), "go")):
                return
            Path(folder, f"{worker}.step").write_text(f"{shard.step} {hvd.size()}")
            time.sleep(0.05)
            state.commit()

    @hvd.elastic.run
    def loop(state):
        while shard.epoch < EPOCHS:
            for features, labels in shard.torch():
                wait_at_gate(state)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(features / ROWS).squeeze(1), labels.float() / ROWS)
                shard.weigh(loss).backward()
                together = allgather_object(labels.tolist() if shard.weight else [], "labels")
                optimizer.step()
                state.seen[shard.epoch] += chain.from_iterable(together)
                shard.advance()
                state.commit()
        return state.seen, hvd.rank(), hvd.size(), model.weight.item()

    return loop(state)


def rows(spark):
    return spark.range(ROWS).select(F.col("id").cast("float").alias("x"), F.col("id").alias("y"))


def training_of(spark, folder, **arguments):
    arguments = {"min_num_proc": 1, "label_cols": "y", "batch_size": BATCH, "start_timeout": SECONDS, **arguments}
    df = rows(spark)
    return Training(spark, folder, lambda: hvd_spark.run_on_dataframe(train, df, (str(folder),), **arguments))


def times_of(results, size):
    """How often each row was seen in each epoch; the ranks agree."""
    assert [result[1:3] for result in results] == [(rank, size) for rank in range(size)]
    assert len({(str(seen), weight) for seen, _, _, weight in results}) == 1
    return [Counter(epoch) for epoch in results[0][0]]


ONCE = dict.fromkeys(range(ROWS), 1)


def test_each_row_once_without_changes(spark, tmp_path):
    (tmp_path / "go").touch()
    assert times_of(training_of(spark, tmp_path, num_proc=2).results(), 2) == [ONCE, ONCE]


def record(shard):
    """The labels of each batch that this rank gets in two epochs, with their weight."""
    import hvd_cluster.torch as hvd

    hvd.init()
    state = hvd.elastic.TorchState(shard=shard)

    @hvd.elastic.run
    def loop(state):
        found = []
        while shard.epoch < 2:
            for _, labels in shard.torch():
                found.append((shard.epoch, labels.tolist(), shard.weight))
                shard.advance()
                state.commit()
        return found

    return loop(state)


def test_rows_that_a_rank_gets_again_have_no_weight(spark):
    """17 rows in batches of 8: one rank has two batches, the other one gets its first batch again."""
    df = spark.range(0, 17, 1, 1).select(F.col("id").cast("float").alias("x"), F.col("id").alias("y"))
    arguments = {"num_proc": 2, "min_num_proc": 1, "label_cols": "y", "batch_size": 8}
    batches = list(chain(*hvd_spark.run_on_dataframe(record, df, **arguments)))
    for epoch in range(2):
        given = [(labels, weight) for number, labels, weight in batches if number == epoch]
        assert sum(len(labels) for labels, _ in given) == 17 + 8
        counted = [label for labels, weight in given if weight for label in labels]
        assert sorted(counted) == list(range(17))
        assert [weight for _, weight in given].count(0.0) == 1


def worker_of(folder, partition):
    return int((folder / f"{partition}").read_text().removeprefix("worker-"))


def lose_worker(spark, worker):
    worker.send_signal(signal.SIGKILL)


def lose_task(spark, worker):
    agent_of(worker).kill()


def lose_executor(spark, worker):
    executor_of(worker).kill()


def lose_executor_after_notice(spark, worker):
    with decommissioned(spark, executor_of(worker)):
        eventually(lambda: not worker.is_running(), SECONDS)


@pytest.mark.parametrize(
    ("lose", "partition"),
    [(lose_worker, 0), (lose_task, 1), (lose_executor, 0), (lose_executor, 1), (lose_executor_after_notice, 1)],
)
def test_each_row_once_with_a_successor(spark, tmp_path, lose, partition):
    """It goes on with the lost worker's partition where the others saw it last."""
    training = training_of(spark, tmp_path, num_proc=2)
    training.until(2, 0, 1)
    lose(spark, training.process(worker_of(tmp_path, partition)))
    training.successor(2, 0, 1)
    assert times_of(training.results(), 2) == [ONCE, ONCE]


def test_a_loss_after_spark_began_the_stage_again(spark, tmp_path):
    """Spark lost rows of the shuffle with an executor, and takes partition 0 for computed since then."""
    training = training_of(spark, tmp_path, num_proc=2)
    training.until(2, 0, 1)
    older = worker_of(tmp_path, 0)
    lose_executor(spark, training.process(worker_of(tmp_path, 1)))
    newer = training.successor(2, 0, 1)
    lose_task(spark, training.process(older))
    training.successor(2, 0, 1, newer)
    assert times_of(training.results(), 2) == [ONCE, ONCE]


def test_a_partition_without_a_worker_is_not_seen(spark, tmp_path, monkeypatch):
    """Its rows of the steps before the loss were seen once, its other ones never."""
    monkeypatch.setenv("HOROVOD_GRACE_SECONDS", "1")  # the driver waits in vain for the end of the agent
    monkeypatch.setattr("executors.agents.local.supervisor.GUARD_SECONDS", 1.0)
    training = training_of(spark, tmp_path, num_proc=2)
    training.until(2, 0, 1)
    agent = agent_of(training.process(1))
    agent.suspend()  # so that no successor comes
    try:
        training.process(1).kill()
        training.until(1, 0)
        first, second = times_of(training.results(), 1)
    finally:
        with suppress(psutil.NoSuchProcess):  # Spark kills what does not end
            agent.resume()
    assert set(first.values()) == set(second.values()) == {1}
    assert (len(first), len(second)) == (ROWS // 2 + GATE * BATCH, ROWS // 2)
    assert set(second) < set(first)


def test_a_newcomer_brings_its_rows(spark, tmp_path):
    training = training_of(spark, tmp_path, num_proc=1, max_num_proc=2)
    training.until(2, 0, 1)
    assert times_of(training.results(), 2) == [ONCE, ONCE]


def test_a_partition_without_a_slot(spark, tmp_path, caplog):
    """A warning names it, and none of its rows is seen."""
    training = training_of(spark, tmp_path, num_proc=2, max_num_proc=3)
    text = "1 of 3 partitions of the DataFrame have no task yet (2): their rows are not trained"
    eventually(lambda: text in caplog.text, SECONDS)
    first, second = times_of(training.results(), 2)
    assert first == second
    assert set(first.values()) == {1}
    assert ROWS - len(first) in range(ROWS // 3 - 2, ROWS // 3 + 3)


def test_rows_that_cannot_be_used(spark):
    df = spark.range(0, 100, 1, 2).withColumn("x", F.when(F.col("id") < 97, F.lit(1.0)))
    with pytest.raises(ValueError, match="column 'x' has nulls") as caught:
        hvd_spark.run_on_dataframe(lambda shard: None, df, num_proc=2, min_num_proc=1, label_cols="id")
    assert isinstance(caught.value.__cause__, RemoteError)


def test_a_dataframe_without_rows(spark):
    df = rows(spark).filter("y < 0")
    with pytest.raises((ExecutorError, ValueError), match="no rows"):
        hvd_spark.run_on_dataframe(train, df, ("",), num_proc=2, min_num_proc=1, label_cols="y")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "must not descend"),
        ({"num_proc": 3, "max_num_proc": 2}, "must not descend"),
        ({"num_proc": 2, "min_num_proc": 0}, "min_num_proc is 0"),
        ({"num_proc": 2, "reset_limit": 1}, "reset_limit: this is for elastic jobs; give min_num_proc"),
        ({"num_proc": 2, "min_num_proc": 1, "batch_size": 0}, "batch_size is 0"),
    ],
)
def test_numbers_that_are_refused(spark, arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd_spark.run_on_dataframe(train, rows(spark), label_cols="y", **arguments)
