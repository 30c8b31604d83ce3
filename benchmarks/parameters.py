"""The cost of a parameter: a training step of a model with many small ones, with different ways to combine gradients.

    python -m benchmarks.parameters --ranks 2 4 --layers 30 --width 64

The model is a row of equal linear layers (each has a weight and a bias), trained in float32 by plain SGD with one
compute thread a rank. The sides train in the same processes, turn by turn: DistributedOptimizer, torch's
DistributedDataParallel on Gloo, and a model of which each rank trains a copy alone, without any exchange.
"""

from __future__ import annotations

import argparse
import statistics

import hvd_cluster
from benchmarks.measure import (
    add_json_argument,
    add_launches_argument,
    interleave,
    rendezvous_file,
    tabulate,
    torch_gloo,
)
from benchmarks.training import build, stepper

GOAL_MS = 3.5
GOAL_RATIO = 0.5
SIDES = ("ours", "DistributedDataParallel", "no exchange")


def measure(layers: int, width: int, batch: int, repeats: int, path: str) -> dict[str, list[float]]:
    """Runs on every rank; for each side the seconds of each step, as this rank sees it."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch_gloo(hvd.rank(), hvd.size(), path)
    torch.manual_seed(2 + hvd.rank())
    images, labels = torch.randn(batch, width), torch.randint(0, width, (batch,))
    widths = [width] * (layers + 1)
    ours, peer, alone = build(widths), torch.nn.parallel.DistributedDataParallel(build(widths)), build(widths)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.001) for model in (ours, peer, alone)]
    optimizers[0] = hvd.DistributedOptimizer(optimizers[0], named_parameters=ours.named_parameters())
    models = zip(SIDES, (ours, peer, alone), optimizers, strict=True)
    sides = {side: stepper(model, optimizer, images, labels) for side, model, optimizer in models}
    seconds = interleave(sides, repeats, 20)
    for mine, theirs in zip(ours.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return seconds


def launch(ranks: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Medians over all steps of all launches, in milliseconds, and their ratios."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.launches):
        given = (arguments.layers, arguments.width, arguments.batch_size, arguments.repeats, rendezvous_file())
        for side, values in hvd_cluster.run(measure, given, num_proc=ranks)[0].items():
            seconds[side] += values
    medians = {side: statistics.median(values) * 1e3 for side, values in seconds.items()}
    ours, peer, alone = medians.values()
    parameters = 2 * arguments.layers
    return {
        "parameters": parameters,
        "ranks": ranks,
        **{f"{side}, ms": value for side, value in medians.items()},
        "us a parameter": (ours - alone) * 1e3 / parameters,
        "ours / DDP": ours / peer,
        "met": "yes" if ours <= GOAL_MS or ours / peer <= GOAL_RATIO else "NO",
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--layers", type=int, default=30, help="linear layers of the model (default: 30)")
    parser.add_argument("--width", type=int, default=64, help="inputs and outputs of each layer (default: 64)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per rank and step (default: 8)")
    add_launches_argument(parser, 3)
    parser.add_argument("--repeats", type=int, default=10, help="rounds of twenty steps of each side (default: 10)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    records = [launch(ranks, arguments) for ranks in arguments.ranks]
    note = f"goal: at most {GOAL_MS} ms, or {GOAL_RATIO} of DistributedDataParallel's time"
    tabulate("many small parameters: a training step, medians", records, arguments, [note])


if __name__ == "__main__":
    from benchmarks.parameters import main as importable_main

    importable_main()
