"""Training steps of MXNet's Gluon with hvd-cluster against ways without it, in an environment with MXNet.

    scripts/mxnet .venv python -m benchmarks.mxnet_training --ranks 2

An MLP 784-2048-2048-10, batch 32 a rank, float32, SGD with momentum, hybridized, one compute thread a rank. The sides
train in the same processes, turn by turn: a ``gluon.Trainer`` without any exchange; DistributedTrainer, with one node a
gradient and with one group; and gradients that travel as one object of Python after backward, which is what a script
can do with MXNet alone. All ranks of "no exchange" train at the same time, so they share memory bandwidth as others do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hvd_cluster
from benchmarks.measure import add_json_argument, tabulate

WIDTHS = [784, 2048, 2048, 10]
BATCH = 32
NONE = "no exchange"
OURS = "DistributedTrainer"


def build(mx: Any) -> Any:
    """The MLP, the same on every rank and side."""
    mx.random.seed(1)
    net = mx.gluon.nn.HybridSequential()
    for inputs, width in pairwise(WIDTHS):
        is_last = width == WIDTHS[-1]
        net.add(mx.gluon.nn.Dense(width, activation=None if is_last else "relu", in_units=inputs))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def trainer_of(mx: Any, hvd: Any, side: str, params: Any) -> Any:
    """The trainer of a side."""
    options = {"learning_rate": 0.001, "momentum": 0.9}
    if side.startswith(OURS):
        return hvd.DistributedTrainer(params, "sgd", options, prefix=side, num_groups=int("group" in side))
    return mx.gluon.Trainer(params, "sgd", options, kvstore=None)


def stepper(mx: Any, hvd: Any, side: str) -> Callable[[], None]:
    """One training step, after which the parameters are there."""
    net = build(mx)
    trainer = trainer_of(mx, hvd, side, net.collect_params())
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    mx.random.seed(2 + hvd.rank())
    images, labels = mx.nd.random.normal(shape=(BATCH, WIDTHS[0])), mx.nd.zeros((BATCH,))

    def step() -> None:
        with mx.autograd.record():
            loss = loss_of(net(images), labels)
        loss.backward()
        if side == "by asnumpy":
            gradients = [each.list_grad()[0] for each in net.collect_params().values()]
            for gathered in zip(*hvd.allgather_object([each.asnumpy() for each in gradients]), strict=True):
                gradients.pop(0)[:] = mx.nd.array(sum(gathered) / len(gathered))
        trainer.step(BATCH)
        mx.nd.waitall()

    return step


def measure(sides: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Runs on every rank; for each side the seconds of a step, by round."""
    import hvd_cluster.mxnet as hvd

    # isort: split
    import mxnet as mx

    hvd.init()
    steppers = {side: stepper(mx, hvd, side) for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, step in steppers.items():
            hvd.allgather(mx.nd.zeros((1,)), name="begin")
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            if number:  # the first round warms up
                seconds[side].append((time.perf_counter() - begin) / steps)
    hvd.shutdown()
    return seconds


def main() -> None:
    """Measure, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    add_json_argument(parser)
    args = parser.parse_args()
    sides = [NONE, OURS, f"{OURS}, one group", "by asnumpy"]
    found = hvd_cluster.run(measure, (sides, args.rounds, args.steps), num_proc=args.ranks)
    median = {side: statistics.median(found[0][side]) for side in sides}
    speeds = {side: BATCH / seconds for side, seconds in median.items()}
    records = [
        {"side": side, "images/s a rank": speeds[side], "of no exchange": speeds[side] / speeds[NONE]} for side in sides
    ]
    tabulate(f"training with MXNet, {args.ranks} ranks, medians", records, args)


if __name__ == "__main__":
    main()
