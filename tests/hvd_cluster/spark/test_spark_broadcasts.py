"""Objects of Spark to which the function of a job refers."""

import os
import pickle
from types import SimpleNamespace

import pytest
from pyspark import Broadcast

from executors.agents.spark.broadcasts import PickledCall, exposed
from executors.job.call import Call
from hvd_cluster.spark import run, run_elastic

# Spark keeps its own processes and connections.
spark_keeps = pytest.mark.leaves("descriptors", "processes")


def stored(path, value):
    """A broadcast variable as Spark gives it to a task: its pickled value is in a file."""
    path.write_bytes(pickle.dumps(value))
    return Broadcast(path=str(path))


def test_each_variable_is_found_again(tmp_path):
    one, two = stored(tmp_path / "one", {"a": 1}), stored(tmp_path / "two", [2])
    call = PickledCall.of(Call.of(lambda *given: [one.value, two.value, one is given[0]], (one,)))
    assert call.broadcasts == (one, two) or call.broadcasts == (two, one)
    with exposed(call.broadcasts, lambda: str(tmp_path)):
        assert pickle.loads(call.data)() == [{"a": 1}, [2], True]
    assert not [name for name in os.environ if "BROADCAST" in name]


def test_a_value_that_spark_has_decrypted(tmp_path):
    known = stored(tmp_path / "known", "value")
    call = PickledCall.of(Call.of(lambda: known.value))
    with exposed([SimpleNamespace(value="decrypted")], lambda: str(tmp_path)):
        assert pickle.loads(call.data)() == "decrypted"
    assert os.listdir(tmp_path) == ["known"]


def test_a_function_without_objects_of_spark():
    call = PickledCall.of(Call.of(int))
    assert (pickle.loads(call.data)(), call.broadcasts) == (0, ())


@spark_keeps
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("start", [run, run_elastic])
def test_workers_have_the_value_of_a_broadcast_variable(spark, start):
    words = spark.sparkContext.broadcast({"a": 1, "b": 2})
    assert start(lambda: words.value["b"], num_proc=2) == [2, 2]
    words.destroy()


@spark_keeps
@pytest.mark.parametrize("start", [run, run_elastic])
def test_an_accumulator_is_refused_before_anything_starts(spark, start):
    total = spark.sparkContext.accumulator(0)

    def count():
        total.add(1)

    with pytest.raises(TypeError, match=r"count cannot be sent to the workers: it refers to an accumulator of Spark"):
        start(count, num_proc=2)
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()
