"""AdaSum or the average at a large batch: which needs fewer steps to the same accuracy?

::

    hvdrun -np 4 python examples/adasum_digits.py --runs 3 --picture adasum.png

Four ranks with batches of 64 learn to read handwritten digits, from the same start and with the same images in each
step, once with ``op=hvd.Average`` and once with ``op=hvd.Adasum``, at several learning rates. AdaSum averages changes
that point the same way, and adds up those that have nothing in common. So its step is longer where the ranks have
learned different things, and at the smaller rates here it needs a half to two thirds of the steps. At the largest rate,
which a search for these four ranks finds, the average needs about as few. A number of the table is the median of runs
from different starts, and the picture has a line for each run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hvd_cluster.torch as hvd

HELD_OUT = 360
OPS = {"Average": hvd.Average, "AdaSum": hvd.Adasum}


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """The images as rows of 64 pixels, and their labels, in a random order that is the same on all ranks."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """The indices of this rank's batches, without an end; each pass over the images has an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        steps = torch.randperm(count, generator=generator).split(size * hvd.size())
        yield from (step[hvd.rank() * size :][:size] for step in steps if len(step) == size * hvd.size())


def train(op: str, rate: float, seed: int, arguments: argparse.Namespace) -> list[float]:
    """The held-out accuracy after each step, until it is good enough."""
    torch.manual_seed(seed)  # all ranks start from the same parameters
    images, labels = digits(seed)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters(), op=OPS[op])
    accuracies: list[float] = []
    for indices in batches(len(labels) - HELD_OUT, arguments.batch_size, seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[HELD_OUT + indices]), labels[HELD_OUT + indices]).backward()
        optimizer.step()
        with torch.no_grad():
            right = network(images[:HELD_OUT]).argmax(dim=1) == labels[:HELD_OUT]
        accuracies.append(right.float().mean().item())
        if accuracies[-1] >= arguments.goal or len(accuracies) == arguments.most_steps:
            return accuracies
    raise AssertionError("batches have no end")


def median(runs: list[list[float]], arguments: argparse.Namespace) -> str:
    """How many steps the median of the runs needs to come to the goal."""
    steps = sorted(len(run) if run[-1] >= arguments.goal else arguments.most_steps + 1 for run in runs)
    middle = steps[len(steps) // 2]
    return str(middle) if middle <= arguments.most_steps else f"> {arguments.most_steps}"


def draw(results: dict[tuple[str, float], list[list[float]]], arguments: argparse.Namespace) -> None:
    """The accuracy by step: one panel for each rate, one line for each run."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(arguments.rates), figsize=(8, 3), sharey=True, layout="constrained")
    for panel, rate in zip(panels, arguments.rates, strict=True):
        for op, color in zip(OPS, ("tab:gray", "tab:blue"), strict=True):
            for seed, run in enumerate(results[op, rate]):
                panel.plot(range(1, len(run) + 1), run, color=color, lw=1.2, label=op if seed == 0 else None)
        panel.axhline(arguments.goal, color="black", lw=0.8, ls=":")
        panel.set(title=f"rate {rate:g}", xlabel="steps", ylim=(0.5, 1))
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend(loc="lower right")
    figure.savefig(arguments.picture)


def main() -> None:
    """Train with both operations at all rates; rank 0 prints a table."""
    parser = argparse.ArgumentParser(description="AdaSum against the average at a large batch.")
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="learning rates to try (%(default)s)")
    add("--batch-size", type=int, default=64, help="of each rank (%(default)s)")
    add("--goal", type=float, default=0.95, help="the accuracy to reach (%(default)s)")
    add("--most-steps", type=int, default=400, help="when to give up (%(default)s)")
    add("--runs", type=int, default=1, help="trainings, each from another start (%(default)s)")
    add("--picture", metavar="FILE", help="draw the curves into this file, such as adasum.png")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    hvd.print_once(f"steps to an accuracy of {arguments.goal:g}, {hvd.size()} ranks x {arguments.batch_size} images")
    hvd.print_once("rate     " + "".join(f"{op:>10}" for op in OPS))
    results = {}
    for rate in arguments.rates:
        for op in OPS:
            results[op, rate] = [train(op, rate, seed, arguments) for seed in range(1, arguments.runs + 1)]
        hvd.print_once(f"{rate:<9g}" + "".join(f"{median(results[op, rate], arguments):>10}" for op in OPS))
    if arguments.picture and hvd.rank() == 0:
        draw(results, arguments)


if __name__ == "__main__":
    main()
