"""A standalone cluster: a master and two workers, each with GPUs that exist on paper; on two hosts, where possible."""

import contextlib
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home
from spark_cluster import driver_result, eventually, variables

from tests.namespaces import HOSTS, Network, Unavailable

# Seven JVMs come up here.
pytestmark = pytest.mark.timeout(300)

SECONDS = 60
MASTER, WORKER = (f"org.apache.spark.deploy.{name}" for name in ("master.Master", "worker.Worker"))
# Each worker has one executor with two slots and two GPUs, of which a task takes one.
APPLICATION = {
    "spark.executor.cores": "2",
    "spark.executor.memory": "512m",
    "spark.executor.resource.gpu.amount": "2",
    "spark.task.resource.gpu.amount": "1",
}


@dataclass
class Standalone:
    """The ``url`` of a master, the address of a driver, the number of hosts, and how to be where a driver is."""

    url: str
    address: str
    hosts: int
    inside: object
    folder: Path

    def run(self, body):
        """The ``result`` of ``body``, in which ``spark`` is a session."""
        settings = APPLICATION | {"spark.driver.host": self.address}
        with self.inside(0):
            return driver_result(body, self.folder, f"session({self.url!r}, **{settings})", SPARK_LOCAL_IP=self.address)


@contextlib.contextmanager
def daemon(folder, name, *arguments, **environment):
    """A daemon of Spark and the file with what it says."""
    log = folder / f"{name}.log"
    command = [Path(_find_spark_home(), "bin", "spark-class"), *arguments, "--webui-port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **variables(str(folder)), **environment}, stdout=file, stderr=file
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(SECONDS)


def said(log, pattern):
    found = []

    def look():
        found[:] = re.findall(pattern, log.read_text())
        return found

    eventually(look, SECONDS)
    return found[0]


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standalone")
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network())
            addresses, inside = ["10.77.0.1", "10.77.0.2"], lambda host: network.inside(HOSTS[host])
        except Unavailable:
            addresses, inside = ["127.0.0.1", "127.0.0.1"], lambda host: contextlib.nullcontext()
        with inside(0):
            master = stack.enter_context(daemon(folder, "master", MASTER, "-h", addresses[0], "-p", "0"))
        url = said(master, r"spark://[\d.]+:\d+")
        for host, address in enumerate(addresses):
            with inside(host):
                arguments = worker_arguments(folder, host, address, url)
                stack.enter_context(daemon(folder, f"worker-{host}", WORKER, *arguments, SPARK_LOCAL_IP=address))
        for host in range(2):
            said(folder / f"worker-{host}.log", "Successfully registered with master")
        yield Standalone(url, addresses[0], len(set(addresses)), inside, folder)


def worker_arguments(folder, host, address, url):
    # GPUs of two workers on one host are different ones, so the numbers go on.
    gpus = [str(2 * host), str(2 * host + 1)]
    resources = [{"id": {"componentName": "spark.worker", "resourceName": "gpu"}, "addresses": gpus}]
    (folder / f"gpus-{host}.json").write_text(json.dumps(resources))
    (folder / f"worker-{host}.properties").write_text(
        f"spark.worker.resource.gpu.amount 2\nspark.worker.resourcesFile {folder}/gpus-{host}.json\n"
    )
    shape = ["-c", "2", "-m", "1g", "-h", address, "-d", str(folder / f"work-{host}")]
    return [*shape, "--properties-file", str(folder / f"worker-{host}.properties"), url]


TRAIN = """
import os
from executors.api import PlacementError
from hvd_cluster.spark import run
from spark_cluster import eventually

def place():
    from hvd_cluster.core import basics
    from hvd_cluster.ops.objects import allgather_object
    from hvd_cluster.spark.task import get_available_devices
    basics.init()
    return {
        "rank": basics.rank(),
        "all": allgather_object(basics.rank()),
        "local": [basics.local_rank(), basics.local_size()],
        "cross": [basics.cross_rank(), basics.cross_size()],
        "devices": get_available_devices(),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"].split(","),
    }

eventually(lambda: spark.sparkContext.defaultParallelism == 4, 60)  # executors come one after the other
places = run(place)
try:
    run(place, num_proc=5)
except PlacementError as error:
    refusal = str(error)

import torch
from pyspark.sql import functions as F
from hvd_cluster.spark.torch import TorchEstimator

df = spark.range(0, 300, 1, 4).select(F.randn(1).alias("a")).withColumn("y", 2 * F.col("a"))
model = torch.nn.Linear(1, 1)
columns = {"feature_cols": ["a"], "label_cols": ["y"]}
training = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.functional.mse_loss, "epochs": 4}
fitted = TorchEstimator(num_proc=3, model=model, verbose=0, **columns, **training).fit(df)
error = F.max(F.abs(F.col("y__output") - F.col("y")))
result = places, refusal, fitted.getHistory(), fitted.transform(df.coalesce(1)).agg(error).first()[0]
"""


@pytest.fixture(scope="module")
def results(standalone):
    return standalone.run(TRAIN)


def test_an_estimator(results):
    """Three workers for two hosts."""
    *_, history, error = results
    assert [record["rows"] for record in history] == [300] * 4
    assert history[-1]["train"]["loss"] < 0.1
    assert error < 1


def test_ranks_follow_hosts_and_see_their_gpus(standalone, results):
    places, refusal, *_ = results
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert [place["all"] for place in places] == [[0, 1, 2, 3]] * 4
    local_size = 4 // standalone.hosts
    assert [place["local"] for place in places] == [[rank % local_size, local_size] for rank in range(4)]
    assert [place["cross"] for place in places] == [[rank // local_size, standalone.hosts] for rank in range(4)]
    assert all(len(place["visible"]) == local_size for place in places)
    assert [place["visible"][place["local"][0]] for place in places] == [place["devices"][0] for place in places]
    assert sorted(device for place in places for device in place["devices"]) == ["0", "1", "2", "3"]
    assert "5 workers need 5 task slots" in refusal
    assert "have 4 (spark.task.resource.gpu.amount=1); set num_proc to at most 4" in refusal
