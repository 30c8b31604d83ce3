"""The cost of a commit in each step: a training step of an MLP with and without it, interleaved.

    python -m benchmarks.commits --ranks 2
    KERAS_BACKEND=tensorflow python -m benchmarks.commits --framework keras

The model, the batch and the optimizer are those of benchmarks.training: 784-2048-2048-10, 23 MB of parameters and as
much momentum. The sides train in the same processes, turn by turn: no commit; ``state.commit()`` after each step;
``state.save()`` after each step, which makes a full copy, as other elastic states do.

With --framework keras a step is ``model.train_on_batch``, on the backend of Keras.

A commit makes a full copy now and then, which medians do not show; the means do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import hvd_cluster
from benchmarks.measure import add_json_argument, add_launches_argument, interleave, tabulate
from benchmarks.training import build, stepper

SIDES = ("no commit", "commit", "full copy")
GOAL_RATIO = 1.03


def measure(framework: str, widths: list[int], batch: int, repeats: int) -> dict[str, list[float]]:
    """Runs on every rank; for each side the seconds of each step, as this rank sees it."""
    return {"torch": _measure_torch, "keras": _measure_keras}[framework](widths, batch, repeats)


def _measure_keras(widths: list[int], batch: int, repeats: int) -> dict[str, list[float]]:
    import numpy as np

    import hvd_cluster.keras as hvd

    hvd.init()
    random = np.random.RandomState(2 + hvd.rank())
    images = random.randn(batch, widths[0]).astype(np.float32)
    labels = random.randint(0, widths[-1], batch)
    sides = {side: _keras_side(side, widths, images, labels) for side in SIDES}
    seconds = interleave(sides, repeats, 10)
    hvd.shutdown()
    return seconds


def _keras_side(side: str, widths: list[int], images: Any, labels: Any) -> Callable[[], None]:
    import keras

    import hvd_cluster.keras as hvd

    hidden = [keras.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    model = keras.Sequential([keras.layers.Input(widths[:1]), *hidden, keras.layers.Dense(widths[-1])])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.001, momentum=0.9))
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train() -> None:
        model.train_on_batch(images, labels)

    if side == "no commit":
        return train
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.sync()
    return with_commits(train, state, state.commit if side == "commit" else state.save)


def _measure_torch(widths: list[int], batch: int, repeats: int) -> dict[str, list[float]]:
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(2 + hvd.rank())
    images, labels = torch.randn(batch, widths[0]), torch.randint(0, widths[-1], (batch,))
    sides = {side: _side(side, widths, images, labels) for side in SIDES}
    seconds = interleave(sides, repeats, 10)
    hvd.shutdown()
    return seconds


def _side(side: str, widths: list[int], images: Any, labels: Any) -> Callable[[], None]:
    import torch

    import hvd_cluster.torch as hvd

    model = build(widths)
    named = [(f"{side}.{name}", value) for name, value in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9), named)
    train = stepper(model, optimizer, images, labels)
    if side == "no commit":
        return train
    state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)
    state.sync()
    return with_commits(train, state, state.commit if side == "commit" else state.save)


def with_commits(train: Callable[[], None], state: Any, keep: Callable[[], None]) -> Callable[[], None]:
    """A step of ``train`` that counts a batch in ``state``, and calls ``keep`` then."""

    def step() -> None:
        train()
        state.batch += 1
        keep()

    return step


def launch(ranks: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Medians and means over all steps of all launches, in milliseconds, and their ratios to those without commit."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.launches):
        given = (arguments.framework, arguments.widths, arguments.batch_size, arguments.repeats)
        for side, values in hvd_cluster.run(measure, given, num_proc=ranks)[0].items():
            seconds[side] += values
    medians = {side: statistics.median(values) * 1e3 for side, values in seconds.items()}
    means = {side: statistics.mean(values) * 1e3 for side, values in seconds.items()}
    bare, commit, full = medians.values()
    return {
        "ranks": ranks,
        **{f"{side}, ms": value for side, value in medians.items()},
        "commit / none": commit / bare,
        "means": means["commit"] / means["no commit"],
        "full / none": full / bare,
        "met": "yes" if commit / bare <= GOAL_RATIO else "NO",
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--framework", choices=("torch", "keras"), default="torch", help="(default: torch)")
    parser.add_argument("--widths", type=int, nargs="+", default=[784, 2048, 2048, 10], help="layers of the MLP")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    add_launches_argument(parser, 3)
    parser.add_argument("--repeats", type=int, default=10, help="rounds of ten steps of each side (default: 10)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    records = [launch(ranks, arguments) for ranks in arguments.ranks]
    note = f"goal: a step with a commit takes at most {GOAL_RATIO} of the time of one without"
    tabulate("commits: a training step, medians", records, arguments, [note])


if __name__ == "__main__":
    from benchmarks.commits import main as importable_main

    importable_main()
