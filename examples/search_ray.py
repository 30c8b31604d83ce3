"""Search for hyperparameters with Ray Tune, and stop bad trials early: ``python examples/search_ray.py``.

Each trial is a job of two ranks, which ``RayExecutor`` starts in the placement group of the trial. Rank 0 tells the
accuracy after each epoch by ``hvd_cluster.ray.log``, and the trial reports it to Ray Tune. The scheduler ASHA stops a
trial after two or four epochs if it is worse than half of those that have come so far. ``tune_ray.py`` has a search
with Ray Train and its checkpoints.

It starts a cluster of its own on this machine. For one that runs already, give ``ray.init()`` its address.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from sklearn.datasets import load_digits
from torch import nn

import hvd_cluster.torch as hvd
from hvd_cluster.ray import RayExecutor, log

HELD_OUT = 360
RANKS = 2


def train(config: dict[str, Any]) -> None:
    """Runs on every rank of a trial."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    bunch, order = load_digits(), torch.randperm(1797)
    images, labels = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]
    network = nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), config["rate"], config["momentum"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    for epoch in range(1, config["epochs"] + 1):
        mine = HELD_OUT + torch.randperm(len(labels) - HELD_OUT)[hvd.rank() :: hvd.size()]
        for batch in mine.split(32)[: (len(labels) - HELD_OUT) // (32 * hvd.size())]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            right = network(images[:HELD_OUT]).argmax(dim=1) == labels[:HELD_OUT]
        if hvd.rank() == 0:
            log({"epoch": epoch, "accuracy": right.float().mean().item()})


def trial(config: dict[str, Any]) -> None:
    """Runs once for each point of the search, in the first bundle of its placement group."""
    settings = RayExecutor.create_settings(timeout_s=60)
    with RayExecutor(settings, num_workers=RANKS) as executor:
        executor.run(train, [config], callbacks=[tune.report])


def search(trials: int, epochs: int, seed: int, folder: str) -> tune.ResultGrid:
    """All trials. Each needs a CPU for every rank; the trial itself only waits."""
    space = {
        "rate": tune.loguniform(0.001, 1.0),
        "momentum": tune.choice([0.0, 0.9]),
        "width": tune.choice([16, 32, 64]),
        "epochs": epochs,
    }
    group = tune.PlacementGroupFactory([{"CPU": 0.1}] + [{"CPU": 1}] * RANKS)
    asha = ASHAScheduler(time_attr="epoch", max_t=epochs, grace_period=min(2, epochs), reduction_factor=2)
    tuner = tune.Tuner(
        tune.with_resources(trial, group),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            search_alg=BasicVariantGenerator(max_concurrent=1, random_state=seed),
            scheduler=asha,
            num_samples=trials,
        ),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    return tuner.fit()


def tell(results: tune.ResultGrid) -> None:
    """The trials, the best one first."""
    print("    rate   momentum   width   epochs   held-out accuracy")
    for _, row in results.get_dataframe().sort_values("accuracy", ascending=False).iterrows():
        values = row["config/rate"], row["config/momentum"], row["config/width"], row["epoch"], row["accuracy"]
        print("{:8.4f}   {:8}   {:5}   {:6}   {:17.4f}".format(*values))


def draw(results: tune.ResultGrid, path: str) -> None:
    """The accuracy of each trial by epoch; dots where it was stopped."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for result in results:
        history, config = result.metrics_dataframe, result.config
        name = f"{config['rate']:.3g}, {config['momentum']}"
        (line,) = axes.plot(history["epoch"], history["accuracy"], label=name)
        axes.plot(history["epoch"].iloc[-1], history["accuracy"].iloc[-1], "o", color=line.get_color())
    axes.set(xlabel="epoch", ylabel="held-out accuracy")
    axes.legend(title="trial: rate, momentum", fontsize=7)
    figure.savefig(path)


def main() -> None:
    """Start a cluster, search, and show the trials."""
    parser = argparse.ArgumentParser(description="Search for hyperparameters with Ray Tune.")
    add = parser.add_argument
    add("--trials", type=int, default=4, help="points to try (%(default)s)")
    add("--epochs", type=int, default=8, help="of the best trials (%(default)s)")
    add("--seed", type=int, default=1, help="of the points (%(default)s)")
    add("--picture", metavar="FILE", help="draw the trials into this file, such as search.svg")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # no tables while it runs
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray would make a token and store it in ~/.ray
    ray.init("local", num_cpus=RANKS + 1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = search(arguments.trials, arguments.epochs, arguments.seed, folder)
            tell(results)
            if arguments.picture:
                draw(results, arguments.picture)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
