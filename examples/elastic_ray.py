"""Learn handwritten digits on Ray workers that come and go: ``python examples/elastic_ray.py --kill``.

The training is that of ``elastic_digits.py``. With ``--kill`` the driver kills one worker in the middle: the others go
on, and another one comes for it. It starts a Ray cluster of its own on this machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from functools import partial
from typing import Any

import ray
from digits import compare, positive
from elastic_digits import add_elastic_options, learn

import hvd_cluster.torch as hvd
from hvd_cluster.ray import RayExecutor, log


def learn_and_tell(epochs: int, batch_size: int, seed: int, pause: float) -> str:
    """Runs on every worker: say who it is, then train."""
    hvd.init()
    log({"rank": hvd.rank(), "process": os.getpid()})  # goes to the callbacks of run()
    return learn(epochs, batch_size, seed, pause)


def hear(kill: bool, killed: list[int], told: dict[str, Any]) -> None:
    """In the driver: show what a worker logged, and kill the first worker that is rank 1."""
    print(f"rank {told['rank']} is process {told['process']}", flush=True)
    if kill and not killed and told["rank"] == 1:
        killed.append(told["process"])
        os.kill(told["process"], signal.SIGKILL)


def main() -> None:
    """Start a cluster, train, and compare the parameters of the ranks."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits on Ray workers that come and go.")
    parser.add_argument("--workers", type=positive, default=2, help="number of workers (%(default)s)")
    parser.add_argument("--kill", action="store_true", help="kill the worker that is rank 1")
    add_elastic_options(parser)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    for name in ("executors", "hvd_cluster._executors"):  # in a checkout, and in a wheel
        logging.getLogger(name).setLevel(logging.INFO)  # a line for each change
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray would make a token and store it in ~/.ray
    ray.init("local", num_cpus=options.workers, include_dashboard=False, logging_level=logging.ERROR)
    try:
        print(compare(train(options)))
    finally:
        ray.shutdown()


def train(options: argparse.Namespace) -> list[str]:
    """The fingerprint of the network of each rank."""
    settings = RayExecutor.create_settings(timeout_s=60)
    workers = {"num_workers": options.workers, "min_workers": 1, "max_workers": options.workers}
    with RayExecutor(settings, **workers, cooldown_range=(1, 1)) as executor:
        arguments = options.epochs, options.batch_size, options.seed, options.pause
        return executor.run(learn_and_tell, arguments, callbacks=[partial(hear, options.kill, [])])


if __name__ == "__main__":
    main()
