"""Learn handwritten digits on a Ray cluster: ``python examples/digits_ray.py``.

It starts a cluster of its own on this machine, and workers in it that train as ``digits.py`` does. For a cluster that
runs already, give ``ray.init()`` its address.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

import ray
from digits import Epoch, Options, Result, add_options, compare, positive, train
from ray.util.queue import Queue
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import hvd_cluster.torch as hvd
from hvd_cluster.ray import RayExecutor

GOOD = 0.95

console = Console(highlight=False)


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    rank: int
    local_rank: int
    pid: int
    host: str
    node: str


def place() -> Place:
    """Where this rank runs."""
    hvd.init()
    node = ray.get_runtime_context().get_node_id()
    return Place(hvd.rank(), hvd.local_rank(), os.getpid(), socket.gethostname(), node)


def train_and_tell(options: Options, channel: Queue) -> Result:
    """Train; the reports of rank 0 go through ``channel``."""
    return train(options, channel.put)


@contextmanager
def shown(epochs: int) -> Iterator[Queue]:
    """A queue; the epochs that are put into it appear as lines above a progress bar."""
    channel = Queue(actor_options={"num_cpus": 0})
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs)

        def follow() -> None:
            epoch: Epoch
            for epoch in iter(channel.get, None):
                console.print(str(epoch))
                progress.advance(task)

        follower = Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield channel
        finally:
            channel.put(None)
            follower.join()


def run(workers: int, options: Options) -> list[Result]:
    """Train on that many workers; returns the final state of each, by rank."""
    settings = RayExecutor.create_settings(timeout_s=60)
    with RayExecutor(settings, num_workers=workers, cpus_per_worker=1, use_gpu=False) as executor:
        console.print(table(executor.run(place)))
        with shown(options.epochs) as channel:
            return executor.run(train_and_tell, args=[options, channel])


def table(places: list[Place]) -> Table:
    """The workers, one a line."""
    result = Table("rank", "local rank", "process", "host", "Ray node")
    for place in places:
        result.add_row(str(place.rank), str(place.local_rank), str(place.pid), place.host, place.node[:12])
    return result


def judge(results: list[Result]) -> None:
    """Say how it went; ends the program where it did not go well."""
    console.print(compare([result.fingerprint for result in results]))
    accuracy = results[0].accuracy
    if accuracy < GOOD:
        sys.exit(f"held-out accuracy: {accuracy:.4f}, less than {GOOD}; give more --epochs")
    console.print(f"held-out accuracy: {accuracy:.4f}")


def main() -> None:
    """Start a cluster, train, and say how it went."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits on a Ray cluster of this machine.")
    parser.add_argument("--workers", type=positive, default=2, help="number of workers (%(default)s)")
    add_options(parser)
    arguments = vars(parser.parse_args())
    workers, options = arguments.pop("workers"), Options(**arguments)

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray would make a token and store it in ~/.ray
    console.print(f"starting a Ray cluster on this machine, and {workers} workers in it")
    ray.init("local", num_cpus=workers, include_dashboard=False, logging_level=logging.ERROR)
    try:
        results = run(workers, options)
    finally:
        ray.shutdown()
    judge(results)


if __name__ == "__main__":
    main()
