"""Tasks meet, and end in order where they cannot; threads are the tasks."""

import io
import json
import pickle
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from executors.agents.spark import rendezvous
from executors.agents.spark import task as tasks
from executors.agents.spark.console import Console
from executors.agents.spark.plan import Plan
from executors.agents.spark.task import run_task
from executors.api import JobSecret, RemoteError
from executors.job.output import Output

SECRET = JobSecret()
HOST = "127.0.0.1"
SIZE = 2


class Context:
    """The BarrierTaskContext of each thread."""

    def __init__(self):
        self.barrier = threading.Barrier(SIZE, timeout=60)
        self.said = [""] * SIZE
        self.own = threading.local()

    def partitionId(self):
        return self.own.number

    def resources(self):
        return {}

    def getTaskInfos(self):
        return [SimpleNamespace(address=f"{HOST}:1")] * SIZE

    def allGather(self, text):
        self.said[self.own.number] = text
        self.barrier.wait()
        said = list(self.said)
        self.barrier.wait()
        return said


def outcomes(plan, context):
    """The rows that all tasks of ``plan`` yield, by rank."""
    rows = []

    def run(number):
        context.own.number = number
        for batch in run_task(plan, iter([])):
            rows.extend(batch.to_pylist())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return {row["rank"]: pickle.loads(row["data"]) for row in rows}


def test_a_server_that_cannot_start_is_the_failure_of_rank_0(monkeypatch):
    def no_server(*arguments):
        raise OSError("no address is free")

    context, listener = Context(), mock.Mock()
    monkeypatch.setattr(rendezvous, "Job", no_server)
    monkeypatch.setattr(tasks.BarrierTaskContext, "get", lambda: context)
    output = Output(SIZE, stdout=io.StringIO(), stderr=io.StringIO())
    with Console(HOST, SIZE, SECRET, output, listener) as console:
        plan = Plan(b"", SIZE, SECRET, ((HOST,), console.port), {}, (), None, 60.0, 5.0, None, None)
        found = outcomes(plan, context)
    assert list(found) == [0]
    with pytest.raises(OSError, match="no address is free") as caught:
        found[0].unwrap()
    assert isinstance(caught.value.__cause__, RemoteError)
    assert "in no_server" in caught.value.__cause__.traceback
    listener.lost.assert_not_called()
    assert json.loads(context.said[0]) == {"refused": False}
