"""Scripts of torch.distributed on the backend "hvd" against the same ones on Gloo, in jobs of their own, turn by turn.

    python -m benchmarks.torch_distributed --ranks 2

A training step with DistributedDataParallel: an MLP 784-2048-2048-10, 32 images a rank, and ResNet-18, 4 images of
64 x 64; float32, SGD with momentum, one compute thread a rank. Then ``all_reduce`` of several sizes, in a row.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import hvd_cluster
from benchmarks.measure import Row, add_launches_argument, add_report_arguments, report
from benchmarks.resnet import resnet18
from benchmarks.training import build, stepper

MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "DDP, MLP": (lambda: build([784, 2048, 2048, 10]), (32, 784)),
    "DDP, ResNet-18": (lambda: resnet18(10), (4, 3, 64, 64)),
}
SIZES = {"32 B": 8, "4 KB": 1024, "1 MB": 1 << 18, "16 MB": 1 << 22}
STEPS = 10
MOST_CALLS = 200
LARGE = 1 << 18


def training(case: str) -> Callable[[], None]:
    """A step of the model of the ``case``, behind DistributedDataParallel."""
    import torch

    build_model, shape = MODELS[case]
    model = torch.nn.parallel.DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return stepper(model, optimizer, torch.randn(shape), torch.randint(0, 10, shape[:1]))


def seconds_of(call: Callable[[], object], calls: int, rounds: int) -> list[float]:
    """Seconds of a call in each of ``rounds`` rows of ``calls``, after one that warms up."""
    from torch import distributed as dist

    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = perf_counter()
        for _ in range(calls):
            call()
        seconds.append((perf_counter() - begin) / calls)
    return seconds[1:]


def measure(backend: str, rounds: int) -> dict[str, list[float]]:
    """Runs on every rank; for each case the seconds of a step or call, by round."""
    import torch
    from torch import distributed as dist

    import hvd_cluster.torch.distributed  # noqa: F401 - the backend "hvd", and init_method="hvd://" for both

    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method="hvd://")
    torch.manual_seed(2 + dist.get_rank())
    seconds = {case: seconds_of(training(case), STEPS, rounds) for case in MODELS}
    for case, count in SIZES.items():
        tensor = torch.zeros(count)
        calls = STEPS if count > LARGE else MOST_CALLS
        seconds[case] = seconds_of(partial(dist.all_reduce, tensor), calls, rounds)
    dist.destroy_process_group()
    return seconds


def rows(ranks: int, arguments: argparse.Namespace) -> list[Row]:
    """A row for each case: medians over all rounds of all launches, in milliseconds."""
    seconds: dict[str, dict[str, list[float]]] = {"hvd": {}, "gloo": {}}
    for _ in range(arguments.launches):
        for backend, found in seconds.items():
            for case, values in hvd_cluster.run(measure, (backend, arguments.rounds), num_proc=ranks)[0].items():
                found.setdefault(case, []).extend(values)
    return [
        Row(case, ranks, "ms", _milliseconds(ours), _milliseconds(seconds["gloo"][case]), min(ours) * 1e3)
        for case, ours in seconds["hvd"].items()
    ]


def _milliseconds(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rows of steps or calls (default: 5)")
    add_launches_argument(parser, 3)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    found = [row for ranks in arguments.ranks for row in rows(ranks, arguments)]
    report('torch.distributed: "hvd" and Gloo', found, arguments)


if __name__ == "__main__":
    from benchmarks.torch_distributed import main as importable_main

    importable_main()
