"""Find a learning rate for handwritten digits with Ray Tune: ``python examples/tune_ray.py``.

Each trial is a run of Ray Train with two workers, which train as ``digits.py`` does. It starts a cluster of its own on
this machine. For a cluster that runs already, give ``ray.init()`` its address, and ``--storage`` a folder or a bucket
that all nodes reach.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from digits import Digits, Options, add_options, batches, evaluate, model, positive, step
from ray import tune
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, report
from ray.tune.integration.ray_train import TuneReportCallback

import hvd_cluster.torch as hvd
from hvd_cluster.ray import HvdTrainer

RATES = (0.001, 0.03)
STATE = "state.pt"


def train(config: dict[str, Any]) -> None:
    """Runs in each worker; the loop of ``digits.py``, with the rate of the trial."""
    hvd.init()
    torch.set_num_threads(1)
    options = Options(config["epochs"], config["batch_size"], config["seed"])
    torch.manual_seed(options.seed + hvd.rank())
    data, network = Digits(options.seed), model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), config["rate"] * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    done = load(network, optimizer)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(done + 1, options.epochs + 1):
        losses = [step(network, optimizer, *batch) for batch in batches(data, options, epoch)]
        loss = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
        metrics = {"epoch": epoch, "loss": loss, "accuracy": evaluate(network, data), "ranks": hvd.size()}
        with tempfile.TemporaryDirectory() as folder:
            report(metrics, checkpoint=save(folder, epoch, network, optimizer) if hvd.rank() == 0 else None)


def save(folder: str, epoch: int, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Checkpoint:
    """A checkpoint after ``epoch`` epochs."""
    state = {"epoch": epoch, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, Path(folder) / STATE)
    return Checkpoint.from_directory(folder)


def load(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of epochs that are done: after a failure Ray Train starts all workers of the trial again."""
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / STATE)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])


def trial(config: dict[str, Any], workers: int, storage: str) -> None:
    """Runs once for each rate: Ray Train on ``workers`` workers, whose reports go to Ray Tune.

    A run of Ray Train goes on where an earlier one of the same name has stopped, so each trial has a name of its own.
    """
    run = RunConfig(
        name=tune.get_context().get_trial_id(),
        storage_path=storage,
        callbacks=[TuneReportCallback()],
        failure_config=FailureConfig(max_failures=1),
    )
    scaling = ScalingConfig(num_workers=workers)
    HvdTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


def search(rates: list[float], workers: int, options: Options, storage: str) -> tune.ResultGrid:
    """One trial after the other. A trial has one CPU for itself, and those of its workers."""
    tuner = tune.Tuner(
        partial(trial, workers=workers, storage=storage),
        param_space={"rate": tune.grid_search(rates), **vars(options)},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=storage, verbose=0),
    )
    return tuner.fit()


def show(results: tune.ResultGrid) -> None:
    """The trials, and the best of them; ends the program where one has failed."""
    for error in results.errors:
        sys.exit(f"a trial has failed: {error}")
    for result in results:
        print(describe(result))
    print(f"best: {describe(results.get_best_result())}")


def describe(result: tune.Result) -> str:
    """One trial, in one line."""
    metrics = result.metrics or {}
    return (
        f"rate {metrics['config']['rate']}   {metrics['ranks']} ranks   epoch {metrics['epoch']}   "
        f"loss {metrics['loss']:.4f}   held-out accuracy {metrics['accuracy']:.4f}"
    )


def main() -> None:
    """Start a cluster, try the rates, and say which is the best."""
    parser = argparse.ArgumentParser(description="Find a learning rate with Ray Tune on a Ray cluster of this machine.")
    parser.add_argument("--workers", type=positive, default=2, help="number of workers of a trial (%(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to try (%(default)s)")
    parser.add_argument("--storage", help="where results and checkpoints go; by default they are not kept")
    add_options(parser)
    parser.set_defaults(epochs=3)
    arguments = vars(parser.parse_args())
    workers, rates, storage = (arguments.pop(name) for name in ("workers", "rates", "storage"))

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray would make a token and store it in ~/.ray
    ray.init("local", num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            show(search(list(rates), workers, Options(**arguments), storage or folder))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
