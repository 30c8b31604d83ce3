"""One Spark application for all tests of a process: two executors, each a JVM of its own with one slot."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MASTER = "local-cluster[2,1,1024]"
# A JVM of a test ends before a better compiler than the first one, or a collector with threads, repays its time.
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CLASSES = Path(sys.prefix) / f"spark-{pyspark.__version__}.jsa"
"""See spark_classes.py. Where it is missing or does not fit, a JVM does without it; it would say so."""
JAVA_OPTIONS = f"{JAVA} -XX:SharedArchiveFile={CLASSES} -Xlog:disable"
SETTINGS = {
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.barrier.sync.timeout": "60",
    # Results of workers that come through Spark at once are soon too large.
    "spark.driver.maxResultSize": "40m",
}


def variables(folder: str) -> dict[str, str]:
    """The environment of a driver whose executors keep their files in ``folder``."""
    paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": f"{folder}/work",
        "SPARK_LOCAL_DIRS": f"{folder}/local",
        "SPARK_SUBMIT_OPTS": JAVA_OPTIONS,
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def session(master: str = MASTER, **settings: str) -> SparkSession:
    builder = SparkSession.builder.master(master)
    for name, value in (SETTINGS | settings).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def connect(master: str) -> object:
    """The session of a Spark Connect client, whose server is a process of its own on this host."""
    return SparkSession.builder.remote(master).getOrCreate()


@contextmanager
def running_session() -> Iterator[SparkSession]:
    """The session, with this process as its driver; fails when a process of it outlives it."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        for name, value in variables(folder).items():
            patch.setenv(name, value)
        before = set(psutil.Process().children(recursive=True))
        spark = session()
        spark.sparkContext.setLogLevel("ERROR")
        started = set(psutil.Process().children(recursive=True)) - before
        yield spark
        spark.stop()
        end_java(30)
        _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive, f"processes of Spark outlived the tests: {alive}"


def end_java(seconds: float) -> None:
    gateway = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(seconds)


DRIVER = """
import json, sys
from spark_cluster import connect, session

spark = {make}
{body}
with open(sys.argv[1], "w") as file:
    json.dump(result, file)
spark.stop()
"""


CONNECT_SECONDS = 600
"""The longest that the client of Connect may take for all of its bodies."""


def driver_result(body: str, folder: Path, make: str, seconds: float = 240, **environment: str) -> object:
    """The ``result`` that ``body`` makes, as a driver of its own, where ``spark`` is its session, which it makes so."""
    (folder / "driver.py").write_text(DRIVER.format(make=make, body=body))
    done = subprocess.run(
        [sys.executable, folder / "driver.py", folder / "result"],
        env={**os.environ, **variables(str(folder)), **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result").read_text())


CONNECT_CLIENT = """
import traceback

def result_of(body):
    names = {{"__name__": "__main__", "spark": spark}}
    try:
        exec(body, names)
    except Exception:
        return {{"failed": traceback.format_exc()}}
    return names["result"]

result = {{name: result_of(body) for name, body in {bodies!r}.items()}}
"""


def workers_left() -> list[psutil.Process]:
    """Our workers and their guards, among the processes that this one started."""
    return [process for process in psutil.Process().children(recursive=True) if _is_ours(process)]


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.1)  # many conditions look at all processes below this one


def _is_ours(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "executors.agents.local.task" in line or "guard.py" in line
