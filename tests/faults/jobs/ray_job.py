"""The driver of a campaign on Ray: ``ray_job RANKS FOLDER MODEL SAMPLES EPOCHS``.

The address of its cluster will be in ``FOLDER/address``.
"""

import logging
import sys
import time
from pathlib import Path

import ray

from hvd_cluster.ray import RayExecutor
from tests.faults.jobs.driver import trapped
from tests.faults.jobs.training import train

POLL_SECONDS = 0.1


def main():
    logging.basicConfig(format="%(message)s")
    logging.getLogger("executors").setLevel(logging.INFO)
    most, folder, *training = sys.argv[1:]
    trapped(folder)
    ray.init(address=address(Path(folder)), log_to_driver=False, logging_level="ERROR")
    settings = RayExecutor.create_settings(timeout_s=120)
    limits = {"min_workers": 1, "num_workers": int(most), "max_workers": int(most), "cooldown_range": (1, 1)}
    with RayExecutor(settings, **limits, elastic_timeout=120) as executor:
        executor.run(train, [folder, *training])


def address(folder):
    """That of the cluster, when all of its nodes are there. The campaign waits for so long, and ends this process."""
    while not (folder / "address").exists():
        time.sleep(POLL_SECONDS)
    return (folder / "address").read_text()


if __name__ == "__main__":
    main()
