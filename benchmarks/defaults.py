"""One training script as users write it, under hvdrun and under torchrun, with nothing set.

    python -m benchmarks.defaults --ranks 2

Each launch starts the script afresh: an MLP of 784-2048-2048-10, a DataLoader with one worker process, batches of 32
images a rank, SGD with momentum. Neither the script nor the environment sets a number of threads. Under torchrun the
script trains with DistributedDataParallel on Gloo, under hvdrun with DistributedOptimizer. Rank 0 times all steps but
the first ones; the table has the medians over the launches, which take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.measure import Row, add_launches_argument, add_report_arguments, report
from benchmarks.training import build

ROOT = Path(__file__).parents[1]
WIDTHS = [784, 2048, 2048, 10]
BATCH = 32
WARM_UP_STEPS = 20
LAUNCH_SECONDS = 300.0
# Variables that are absent from the environment of a user who tunes nothing.
UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def train(side: str, steps: int, output: str) -> None:
    """The script of one rank; rank 0 writes the images/s of all ranks together to ``output``."""
    rank, size, model, optimizer = _ours() if side == "ours" else _peer()
    batches = _batches(rank, WARM_UP_STEPS + steps)
    _steps(model, optimizer, islice(batches, WARM_UP_STEPS))
    begin = perf_counter()
    _steps(model, optimizer, batches)
    speed = size * BATCH * steps / (perf_counter() - begin)
    if rank == 0:
        Path(output).write_text(json.dumps(speed))
    if side == "peer":
        import torch

        torch.distributed.destroy_process_group()


def _ours() -> tuple[int, int, Any, Any]:
    import hvd_cluster.torch as hvd

    hvd.init()
    model = build(WIDTHS)
    optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.rank(), hvd.size(), model, optimizer


def _peer() -> tuple[int, int, Any, Any]:
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(build(WIDTHS))
    return distributed.get_rank(), distributed.get_world_size(), model, _sgd(model)


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def _batches(rank: int, steps: int) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(2 + rank)
    rows = steps * BATCH
    images, labels = torch.randn(rows, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (rows,))
    return iter(DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True, num_workers=1))


def _steps(model: Any, optimizer: Any, batches: Iterator[Any]) -> None:
    from torch.nn.functional import cross_entropy

    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def launch(side: str, ranks: int, steps: int) -> float:
    """The images/s of one launch. Raises CalledProcessError where it failed."""
    launcher = {
        "ours": ["hvd_cluster", "-np", str(ranks), sys.executable],
        "peer": ["torch.distributed.run", "--nproc-per-node", str(ranks)],
    }[side]
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as folder:
        output = Path(folder) / "speed.json"
        script = [str(Path(__file__)), "--side", side, "--steps", str(steps), "--output", str(output)]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", *launcher, *script]
        subprocess.run(command, env=environment, check=True, timeout=LAUNCH_SECONDS, capture_output=True)
        speed: float = json.loads(output.read_text())
    return speed


def measure(ranks: int, arguments: argparse.Namespace) -> Row:
    """Medians over the launches of each side, which take turns."""
    speeds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(arguments.launches):
        for side, values in speeds.items():
            values.append(launch(side, ranks, arguments.steps))
    ours, peer = statistics.median(speeds["ours"]), statistics.median(speeds["peer"])
    return Row("-".join(map(str, WIDTHS)), ranks, "images/s", ours, peer, max(speeds["ours"]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--steps", type=int, default=150, help="timed steps of each launch (default: 150)")
    add_launches_argument(parser, 5)
    add_report_arguments(parser)
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        train(arguments.side, arguments.steps, arguments.output)
        return
    rows = [measure(ranks, arguments) for ranks in arguments.ranks]
    report("a script with nothing set: hvdrun, and torchrun with DistributedDataParallel on Gloo", rows, arguments)


if __name__ == "__main__":
    main()
