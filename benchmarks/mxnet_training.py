"""Training steps of MXNet's Gluon with hvd-cluster against ways without it, in an environment with MXNet.

    scripts/mxnet .venv python -m benchmarks.mxnet_training --ranks 2

An MLP 784-2048-2048-10, batch 32 a rank, float32, SGD with momentum, hybridized, one compute thread a rank. The sides
are jobs of their own, turn by turn: a ``gluon.Trainer`` without any exchange; DistributedTrainer, by default and with a
group for each gradient; and gradients that travel as one object of Python after backward, which is what a script can do
with MXNet alone. All ranks of "no exchange" train at the same time, so they share memory bandwidth as others do. The
sides cannot share processes: a second net there trains at 0.9, a third at 0.8 of the speed of the first one.

On all sides malloc gives each large array pages of its own, see MALLOC. By default some arrays get their own pages, and
which ones differs in each run. So an update of MXNet takes 15 to 24 ms, a difference larger than an exchange.
``--default-malloc`` leaves that to chance.
"""

from __future__ import annotations

import argparse
import os
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
ALONE = "DistributedTrainer, each alone"
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}


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
        return hvd.DistributedTrainer(params, "sgd", options, num_groups=len(params.keys()) if side == ALONE else 0)
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


def measure(side: str, rounds: int, steps: int) -> list[float]:
    """Runs on every rank; the seconds of a step, by round."""
    import hvd_cluster.mxnet as hvd

    # isort: split
    import mxnet as mx

    hvd.init()
    step = stepper(mx, hvd, side)
    seconds: list[float] = []
    for _ in range(rounds + 1):
        hvd.allgather(mx.nd.zeros((1,)), name="begin")
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        seconds.append((time.perf_counter() - begin) / steps)
    hvd.shutdown()
    return seconds[1:]  # the first round warms up


def main() -> None:
    """Measure, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=5, help="jobs of each side")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--default-malloc", action="store_true", help="do not set GLIBC_TUNABLES")
    add_json_argument(parser)
    args = parser.parse_args()
    environment = {**os.environ, **({} if args.default_malloc else MALLOC)}
    seconds: dict[str, list[float]] = {side: [] for side in [NONE, OURS, ALONE, "by asnumpy"]}
    for _ in range(args.launches):
        for side, found in seconds.items():
            found.extend(
                hvd_cluster.run(measure, (side, args.rounds, args.steps), num_proc=args.ranks, env=environment)[0]
            )
    speeds = {side: BATCH / statistics.median(found) for side, found in seconds.items()}
    records = [
        {"side": side, "images/s a rank": speed, "of no exchange": speed / speeds[NONE]}
        for side, speed in speeds.items()
    ]
    tabulate(f"training with MXNet, {args.ranks} ranks, medians", records, args)


if __name__ == "__main__":
    main()
