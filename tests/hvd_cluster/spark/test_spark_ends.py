"""However a job ends, nothing of it is left: no process, no shared memory, no file."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from spark_cluster import eventually, variables

from executors.api import WorkerError
from hvd_cluster.spark import run
from tests.conftest import LOOK

# Each driver starts Spark.
pytestmark = pytest.mark.timeout(400)

HANG_S = 600
SECONDS = 60

# Both ranks say that they are there, with a collective in between, and then wait for their end.
SCRIPT = """
import os, sys, time
from pathlib import Path
from spark_cluster import session

def train(folder):
    import psutil, torch
    import hvd_cluster.torch as hvd
    hvd.init()
    hvd.allreduce(torch.ones(1 << 20))
    spread = psutil.Process().parents()[:2]
    pids = [os.getpid(), *(process.pid for process in spread)]
    (Path(folder) / f"there.{hvd.rank()}.tmp").write_text(" ".join(map(str, pids)))
    (Path(folder) / f"there.{hvd.rank()}.tmp").rename(Path(folder) / f"there.{hvd.rank()}")
    time.sleep(600)

spark = session(sys.argv[2])
from hvd_cluster.spark import run
try:
    run(train, (sys.argv[1],), num_proc=2)
finally:
    Path(sys.argv[1], "left").touch()
"""


class Driver:
    """A driver of its own, in whose job two ranks wait; ``processes`` are all that it started, in all generations."""

    def __init__(self, folder, master):
        (folder / "driver.py").write_text(SCRIPT)
        self.folder = folder
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, folder / "driver.py", folder, master],
                env={**os.environ, **variables(str(folder))},
                start_new_session=True,
                stderr=log,
            )
        self.ranks = []
        self.processes = []

    def wait(self):
        eventually(self._there, 180)
        self.processes = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def _there(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()
        return len(list(self.folder.glob("there.?"))) == 2

    def all_gone(self):
        return not psutil.wait_procs(self.processes, timeout=0)[1]

    def close(self):
        self.process.kill()
        self.process.wait(SECONDS)
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def driver(tmp_path):
    pytest.importorskip("torch")
    drivers = []

    def start(master):
        drivers.append(Driver(tmp_path, master))
        return drivers[-1].wait()

    yield start
    for each in drivers:
        each.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_takes_all_with_it(driver, tmp_path, number):
    memory = LOOK["shared_memory"]()
    started = driver("local-cluster[2,1,1024]" if number == signal.SIGKILL else "local[2]")
    assert len(started.processes) >= 7  # Java, twice a worker with its guard and the Python of Spark
    started.process.send_signal(number)
    assert started.process.wait(SECONDS) != 0
    eventually(started.all_gone, SECONDS)
    assert (tmp_path / "left").exists() is (number == signal.SIGINT)
    eventually(lambda: LOOK["shared_memory"]() <= memory, SECONDS)
    assert not [path for path in (tmp_path / "local").rglob("*") if path.is_file()]


def executor_of(process):
    """The JVM that is above a worker: its guard, the Python of Spark and a daemon are in between."""
    return next(parent for parent in process.parents() if parent.name() == "java")


def kill_on_1(folder, victim):
    """Waits for ever, but on rank 1, which kills once both are there; each start leaves a mark."""
    rank = int(os.environ["HOROVOD_RANK"])
    with open(f"{folder}/attempts.{rank}", "a") as file:
        file.write("x")
    if rank == 1:
        eventually(Path(folder, "attempts.0").exists, HANG_S)
        victim(psutil.Process()).kill()
    time.sleep(HANG_S)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.leaves("descriptors", "processes")
@pytest.mark.parametrize("victim", [executor_of, lambda worker: worker.parent().parent()], ids=["executor", "task"])
def test_a_lost_executor_or_task_ends_the_job_without_another_attempt(spark, tmp_path, victim):
    memory = LOOK["shared_memory"]()
    with pytest.raises(WorkerError, match=r"the task of rank 1 on .* was lost: its executor was killed") as caught:
        run(kill_on_1, (tmp_path, victim), num_proc=2)
    assert caught.value.rank == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"attempts.0": "x", "attempts.1": "x"}
    eventually(lambda: LOOK["shared_memory"]() <= memory, SECONDS)
    assert run(os.getpid, num_proc=1)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.leaves("descriptors", "processes")
def test_a_guard_that_is_killed_takes_its_worker_with_it(spark, tmp_path):
    with pytest.raises(WorkerError, match=r"rank 1 on .* before its function returned"):
        run(kill_on_1, (tmp_path, psutil.Process.parent), num_proc=2)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.leaves("descriptors", "processes")
def test_the_python_of_spark_is_as_it_was(spark):
    def look(batches):
        import threading

        import pyarrow

        rows = sum(batch.num_rows for batch in batches)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hvd-")]
        imported = "executors.agents.spark.task" in sys.modules
        yield pyarrow.RecordBatch.from_pydict({"seen": [f"{rows} {imported} {names}"]})

    run(os.getpid, num_proc=2)
    seen = spark.range(0, 2, 1, 2).mapInArrow(look, "seen string", barrier=True).toArrow()
    assert seen.column("seen").to_pylist() == ["1 True []"] * 2
