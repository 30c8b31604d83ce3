"""An elastic job and Ray's real autoscaler, whose nodes are processes of this machine: ``scripts/ray_autoscaler``.

The job starts with two workers and wants four. The autoscaler brings a node for them; this one is killed; the job goes
on, and the autoscaler brings another node. It is no test: it takes a minute, and needs the port 6379 for itself.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray
from elastic_run import ElasticRun

HEAD = "f" * 51 + "00000"
# The provider's nodes look for the head here, whatever port it has.
PORT = 6379
PROVIDER = {
    "type": "external",
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
    "launch_multiple": True,
    "head_node_id": HEAD,
}
NODE_TYPES = {
    "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
    "worker": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 1, "max_workers": 3},
}
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
CONFIG = {
    "cluster_name": "fake",
    "max_workers": 4,
    "provider": PROVIDER,
    "available_node_types": NODE_TYPES,
    "head_node_type": "ray.head.default",
    "auth": {},
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.5,
    "docker": {},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    "cluster_synced_files": [],
    "rsync_exclude": [],
    "rsync_filter": [],
    **{f"{name}_commands": [] for name in COMMANDS},
}
VARIABLES = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    "RAY_AUTH_MODE": "disabled",
}
START_SECONDS = 120

log = logging.getLogger("autoscaler")


@contextmanager
def autoscaling_cluster(folder):
    """A head without CPUs; the autoscaler starts nodes with two. Ends the processes with ``folder`` as an argument."""
    config = Path(folder, "config.json")
    config.write_text(json.dumps(CONFIG))
    program = str(Path(sys.executable).with_name("ray"))
    options = ["--num-cpus=0", f"--port={PORT}", f"--autoscaling-config={config}", f"--temp-dir={folder}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        subprocess.run(
            [program, "start", "--head", *options, "--include-dashboard=false", "--disable-usage-stats"],
            env={**os.environ, **VARIABLES, "PATH": path},
            check=True,
            timeout=START_SECONDS,
            stdout=subprocess.DEVNULL,
        )
        ray.init(address=f"127.0.0.1:{PORT}", log_to_driver=False, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        for process in processes_of(folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def processes_of(text):
    """The processes that have ``text`` in an argument."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(text in argument for argument in process.cmdline()):
                found.append(process)
    return found


def show(text, world):
    log.info("%s: ranks on the nodes %s", text, [each["node"][-5:] for each in world])


def run(folder):
    """The job, and what happens to it."""
    job = ElasticRun(Path(folder), min_workers=1, num_workers=2, max_workers=4)
    try:
        show("started", job.world(2))
        world = job.world(4)
        show("the autoscaler brought a node", world)
        victim = next(each["node"] for each in world if each["node"] != world[0]["node"])
        gone = [each["worker"] for each in world if each["node"] == victim]
        killed = time.monotonic()
        for process in processes_of(victim):
            if "raylet" in process.name():
                process.kill()
        show("a node was killed", job.world(2, gone))
        show(f"it was replaced {time.monotonic() - killed:.1f} s later", job.world(4, gone))
        values = job.end()
        assert [value[1:] for value in values] == [(rank, 0) for rank in range(4)], values
    finally:
        job.close()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    for name in ("executors", "autoscaler"):
        logging.getLogger(name).setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="hvd-ray-") as folder, autoscaling_cluster(folder):
        run(folder)
