"""One Ray cluster for all tests here: two nodes of two CPUs, the second with four GPUs that exist on paper."""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from executors.agents.ray.placement.autoscaler import AutoscalerRequest
from executors.agents.ray.placement.reservation import PlacementGroupReaper
from executors.agents.ray.remote_driver import RemoteDriver
from executors.agents.ray.worker import HorovodWorker

HERE = Path(__file__).parent
STORE_BYTES = 80 << 20
# Ours, and those of Ray Train.
KINDS = (HorovodWorker, PlacementGroupReaper, AutoscalerRequest, RemoteDriver, "RayTrainWorker", "TrainController")
ACTORS = tuple(f"ray::{getattr(kind, '__name__', kind)}" for kind in KINDS)
# Ray says after 2 seconds, instead of after 12, that a node died.
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 2}
# No worker processes before they are needed, and no metrics of the nodes, which no test reads.
LESS = {"prestart_worker_first_driver": False, "enable_metrics_collection": False}


@contextmanager
def running_cluster(nodes: int = 2) -> Iterator[Cluster]:
    """The cluster, or only its first node, with this process as its driver; fails when a node lives 10 s longer."""
    with ray_folder() as folder:
        cluster = Cluster()
        add_node(cluster, folder, include_dashboard=False, _system_config=HEALTH | LESS)
        if nodes == 2:
            add_node(cluster, folder, num_gpus=4)
        connect(cluster)
        started = psutil.Process().children(recursive=True)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
        # Not by psutil.wait_procs, which may raise FileNotFoundError for a process that ends meanwhile.
        eventually(lambda: not any(_is_raylet(process) for process in started), 10)


@contextmanager
def ray_folder() -> Iterator[str]:
    """A folder for the files of a cluster that is started in the block, and an environment for its processes."""
    paths = [str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
    # The folder's name is a part of the paths of Unix sockets, which have to be short.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # Ray notes the address of the cluster in this folder, which only a local ray.init() would make.
        patch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield folder


def add_node(cluster: Cluster, folder: str, **options: object):
    return cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES, temp_dir=folder, **options)


def connect(cluster: Cluster) -> None:
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")


def groups_left() -> list[dict[str, object]]:
    return [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def all_are_free() -> bool:
    """Whether Ray says so; it tells late what was given back."""
    return ray.available_resources().get("CPU", 0.0) >= ray.cluster_resources()["CPU"]


def workers_left() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if _title(process).startswith(ACTORS)]


def eventually(condition: Callable[[], bool], seconds: float, pause: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {state()}"
        time.sleep(pause)


def state() -> str:
    """Of the cluster, for the message of a test that waits in vain."""
    if not ray.is_initialized():
        return "Ray has ended"
    free, all_resources = ray.available_resources(), ray.cluster_resources()
    return f"groups {groups_left()}, workers {workers_left()}, free {free} of {all_resources}"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _is_raylet(process: psutil.Process) -> bool:
    """Whether that is a node of Ray that has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE and "raylet" in process.name()
    except psutil.Error:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
