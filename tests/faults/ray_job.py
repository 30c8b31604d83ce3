"""The driver of a campaign on Ray: ``ray_job RANKS FOLDER MODEL SAMPLES EPOCHS``.

It makes a cluster of a head without CPUs and of two nodes, and writes the process of the second one to
``FOLDER/second``. When ``FOLDER/restore`` exists, another node comes for it.
"""

import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from hvd_cluster.ray import RayExecutor
from tests.faults.training import train

STORE_BYTES = 80 << 20
# Ray says after 2 seconds, instead of after 12, that a node died.
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 2}
POLL_SECONDS = 0.1


class Nodes:
    """The nodes of the cluster in ``folder``, with ``slots`` CPUs together."""

    def __init__(self, folder, slots):
        self._folder = folder
        self._slots = slots - slots // 2
        (folder / "ray").mkdir()  # Ray notes the address of the cluster there
        self._cluster = Cluster()
        self._add(0, include_dashboard=False, _system_config=HEALTH)
        self._add(slots // 2)
        self._second = self._begin_second()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    def _add(self, cpus, **options):
        return self._cluster.add_node(
            num_cpus=cpus, object_store_memory=STORE_BYTES, temp_dir=str(self._folder), **options
        )

    def _begin_second(self):
        node = self._add(self._slots)
        (self._folder / "second").write_text(str(node.all_processes["raylet"][0].process.pid))
        return node

    def restore(self):
        """Let another node come for the second one, if the campaign wants it; in the main thread, as Ray has it."""
        if (self._folder / "restore").exists():
            (self._folder / "restore").unlink()
            self._cluster.remove_node(self._second, allow_graceful=False)
            self._second = self._begin_second()

    def close(self):
        ray.shutdown()
        self._cluster.shutdown()


def main():
    logging.basicConfig(format="%(message)s")
    logging.getLogger("executors").setLevel(logging.INFO)
    most, folder, *training = sys.argv[1:]
    nodes = Nodes(Path(folder), int(most))
    try:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(run, int(most), folder, *training)
            while not job.done():
                nodes.restore()
                time.sleep(POLL_SECONDS)
            job.result()
    finally:
        nodes.close()


def run(most, *arguments):
    settings = RayExecutor.create_settings(timeout_s=120)
    limits = {"min_workers": 1, "num_workers": most, "max_workers": most, "cooldown_range": (1, 1)}
    with RayExecutor(settings, **limits, elastic_timeout=120) as executor:
        executor.run(train, list(arguments))


if __name__ == "__main__":
    main()
