"""One training script as users write it, under hvdrun and under torchrun, with nothing set.

    python -m benchmarks.defaults --ranks 2

Each launch starts the script afresh: an MLP of 784-2048-2048-10 with batches of 32 images a rank, or a ResNet-18 with
batches of 8 images of 64 x 64 pixels; a DataLoader with one worker process, SGD with momentum. Neither the script nor
the environment sets a number of threads. Under torchrun the script trains with DistributedDataParallel on Gloo, under
hvdrun with DistributedOptimizer. Rank 0 times all steps but the first ones; the table has the medians over the
launches, which take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.measure import Row, add_launches_argument, add_report_arguments, report
from benchmarks.resnet import resnet18
from benchmarks.training import build

ROOT = Path(__file__).parents[1]
CLASSES = 10


class Case(NamedTuple):
    """A model, its input, and how many steps are timed."""

    build: Callable[[], Any]
    shape: tuple[int, ...]
    batch: int
    warm_up: int
    steps: int


CASES = {
    "mlp": Case(lambda: build([784, 2048, 2048, CLASSES]), (784,), 32, 20, 150),
    "resnet18": Case(lambda: resnet18(CLASSES), (3, 64, 64), 8, 3, 20),
}
LAUNCH_SECONDS = 300.0
# These variables are absent where the user tunes nothing.
UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def train(side: str, case: Case, output: str) -> None:
    """The script of one rank; rank 0 writes the images/s of all ranks together to ``output``."""
    rank, size, model, optimizer = _ours(case) if side == "ours" else _peer(case)
    batches = _batches(rank, case)
    _steps(model, optimizer, islice(batches, case.warm_up))
    begin = perf_counter()
    _steps(model, optimizer, batches)
    speed = size * case.batch * case.steps / (perf_counter() - begin)
    if rank == 0:
        Path(output).write_text(json.dumps(speed))
    if side == "peer":
        import torch

        torch.distributed.destroy_process_group()


def _ours(case: Case) -> tuple[int, int, Any, Any]:
    import hvd_cluster.torch as hvd

    hvd.init()
    model = case.build()
    optimizer = hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.rank(), hvd.size(), model, optimizer


def _peer(case: Case) -> tuple[int, int, Any, Any]:
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(case.build())
    return distributed.get_rank(), distributed.get_world_size(), model, _sgd(model)


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def _batches(rank: int, case: Case) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(2 + rank)
    rows = (case.warm_up + case.steps) * case.batch
    images, labels = torch.randn(rows, *case.shape), torch.randint(0, CLASSES, (rows,))
    return iter(DataLoader(TensorDataset(images, labels), batch_size=case.batch, shuffle=True, num_workers=1))


def _steps(model: Any, optimizer: Any, batches: Iterator[Any]) -> None:
    from torch.nn.functional import cross_entropy

    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def launch(side: str, ranks: int, model: str) -> float:
    """The images/s of one launch. Raises CalledProcessError where it failed."""
    launcher = {
        "ours": ["hvd_cluster", "-np", str(ranks), sys.executable],
        "peer": ["torch.distributed.run", "--nproc-per-node", str(ranks)],
    }[side]
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as folder:
        output = Path(folder) / "speed.json"
        script = [str(Path(__file__)), "--side", side, "--models", model, "--output", str(output)]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", *launcher, *script]
        subprocess.run(command, env=environment, check=True, timeout=LAUNCH_SECONDS, capture_output=True)
        speed: float = json.loads(output.read_text())
    return speed


def measure(model: str, ranks: int, arguments: argparse.Namespace) -> Row:
    """Medians over the launches of each side, which take turns."""
    speeds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(arguments.launches):
        for side, values in speeds.items():
            values.append(launch(side, ranks, model))
    ours, peer = statistics.median(speeds["ours"]), statistics.median(speeds["peer"])
    return Row(model, ranks, "images/s", ours, peer, max(speeds["ours"]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--models", choices=CASES, nargs="+", default=list(CASES), help="models (default: all)")
    add_launches_argument(parser, 5)
    add_report_arguments(parser)
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        train(arguments.side, CASES[arguments.models[0]], arguments.output)
        return
    rows = [measure(model, ranks, arguments) for model in arguments.models for ranks in arguments.ranks]
    report("a script with nothing set: hvdrun, and torchrun with DistributedDataParallel on Gloo", rows, arguments)


if __name__ == "__main__":
    main()
