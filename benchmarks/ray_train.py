"""One training function under Ray Train: HvdTrainer, and TorchTrainer with DistributedDataParallel on Gloo.

    python -m benchmarks.ray_train

The model and the optimizer are those of ``benchmarks.training``, the batch is 32 images a worker, always the same ones.
Each launch is a ``fit()`` with new workers, on one Ray cluster of this machine. The sides take turns, and each has had
a launch before that does not count.

* to the first step: from the call of ``fit()`` until rank 0 has done a step;
* images/s: of all workers together, from rank 0's clock, after some steps that do not count.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks.measure import Row, add_launches_argument, add_report_arguments, report
from benchmarks.training import build, stepper

WIDTHS = [784, 2048, 2048, 10]
BATCH = 32
WARM_UP_STEPS = 20


class Launch(NamedTuple):
    """Seconds from the call of ``fit()`` to the end of the first step, and images/s."""

    first: float
    speed: float


def train(config: dict[str, Any]) -> tuple[float, float]:
    """Runs in each worker; the time of the end of the first step, of the clock of the host, and images/s."""
    import torch

    model = build(WIDTHS)
    size, wrapped, optimizer = _ours(model) if config["side"] == "ours" else _peer(model)
    step = stepper(wrapped, optimizer, torch.randn(BATCH, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (BATCH,)))
    step()
    first = time.time()
    for _ in range(WARM_UP_STEPS):
        step()
    begin = time.perf_counter()
    for _ in range(config["steps"]):
        step()
    return first, size * BATCH * config["steps"] / (time.perf_counter() - begin)


def _ours(model: Any) -> tuple[int, Any, Any]:
    import hvd_cluster.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.size(), model, optimizer


def _peer(model: Any) -> tuple[int, Any, Any]:
    from ray.train import get_context
    from ray.train.torch import prepare_model

    wrapped = prepare_model(model)
    return get_context().get_world_size(), wrapped, _sgd(wrapped)


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def launch(side: str, ranks: int, steps: int, storage: str) -> Launch:
    """One ``fit()`` of one side."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from hvd_cluster.ray import HvdTrainer

    trainer = {"ours": HvdTrainer, "peer": TorchTrainer}[side](
        train,
        train_loop_config={"side": side, "steps": steps},
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=storage),
    )
    begin = time.time()
    first, speed = trainer.fit().return_value
    return Launch(first - begin, speed)


def measure(ranks: int, launches: int, steps: int) -> list[Row]:
    """Medians over the launches of each side, which take turns."""
    taken: dict[str, list[Launch]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as storage:
        for turn in range(launches + 1):
            for side in taken:
                result = launch(side, ranks, steps, storage)
                if turn:
                    taken[side].append(result)
    ours, peer = taken["ours"], taken["peer"]
    firsts, speeds = [each.first for each in ours], [each.speed for each in ours]
    median = statistics.median
    return [
        Row("to the first step", ranks, "s", median(firsts), median(each.first for each in peer), min(firsts)),
        Row("training", ranks, "images/s", median(speeds), median(each.speed for each in peer), max(speeds)),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of workers (default: 2)")
    parser.add_argument("--steps", type=int, default=150, help="steps that are timed (default: %(default)s)")
    add_launches_argument(parser, 3)
    add_report_arguments(parser)
    arguments = parser.parse_args()

    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray would make a token and store it in ~/.ray
    cpus = max(arguments.ranks)
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        rows = [row for ranks in arguments.ranks for row in measure(ranks, arguments.launches, arguments.steps)]
    finally:
        ray.shutdown()
    report("Ray Train: HvdTrainer and TorchTrainer with DistributedDataParallel on Gloo", rows, arguments)


if __name__ == "__main__":
    main()
