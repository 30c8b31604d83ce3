"""A training step whose optimizer is sharded over the ranks, against ways in which each rank updates all parameters.

    python -m benchmarks.sharded --ranks 2
    python -m benchmarks.sharded --ranks 4 --models "MLP of 100 M" --optimizers AdamW --steps 3

The sides are jobs of their own, turn by turn: DistributedOptimizer, the same with sharded=True, DistributedDataParallel
on Gloo, the same with ZeroRedundancyOptimizer, and ranks that train without any exchange. float32, one compute thread a
rank. The memory is what model, gradients and state have added to all processes together, shared memory counted once.

On all sides malloc keeps the memory that an optimizer uses for a moment in each step, see MALLOC. By default it gives
some of it back to the kernel, more in one launch than in the next: a step with AdamW takes 38 to 55 ms then.
``--default-malloc`` leaves that to chance.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import hvd_cluster
from benchmarks.measure import add_json_argument, add_launches_argument, tabulate
from benchmarks.resnet import resnet18
from benchmarks.training import build

OURS, SHARDED, DDP, ZERO, NONE = "ours", "sharded", "DDP", "DDP, ZeRO", "no exchange"
SIDES = (OURS, SHARDED, DDP, ZERO, NONE)
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"}
VOCABULARY, WIDTH, LAYERS, TOKENS = 2000, 320, 6, 64


def transformer() -> Any:
    """8.7 M parameters."""
    import torch

    class Transformer(torch.nn.Module):
        """An embedding, an encoder, and a score for each word."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
            layer = torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.scores = torch.nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: Any) -> Any:
            return self.scores(self.encoder(self.embedding(tokens)))[:, 0]

    torch.manual_seed(1)
    return Transformer()


def _images(*shape: int) -> Callable[[], Any]:
    def batch() -> Any:
        import torch

        return torch.randn(shape)

    return batch


def _tokens() -> Any:
    import torch

    return torch.randint(0, VOCABULARY, (8, TOKENS))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "MLP": (lambda: build([784, 2048, 2048, 10]), _images(32, 784)),
    "ResNet-18": (lambda: resnet18(10), _images(8, 3, 64, 64)),
    "transformer": (transformer, _tokens),
    "MLP of 100 M": (lambda: build([784, 6800, 6800, 6800, 10]), _images(8, 784)),
}


def _optimizers() -> dict[str, tuple[Any, dict[str, Any]]]:
    from torch import optim

    return {
        "SGD": (optim.SGD, {"lr": 0.001, "momentum": 0.9}),
        "AdamW": (optim.AdamW, {"lr": 0.0001}),
        "AdamW, fused": (optim.AdamW, {"lr": 0.0001, "fused": True}),
    }


def _sides(side: str, model: Any, optimizer: str) -> tuple[Any, Any]:
    """The model and the optimizer of a side."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    import hvd_cluster.torch as hvd

    kind, options = _optimizers()[optimizer]
    if side in (DDP, ZERO):
        model = torch.nn.parallel.DistributedDataParallel(model)
    if side == ZERO:
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **options)
    plain = kind(model.parameters(), **options)
    if side in (OURS, SHARDED):
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(plain, named_parameters=named, sharded=side == SHARDED)
    return model, plain


def resident() -> float:
    """The memory of this process in MB; what it shares with others counts by its share."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def measure(side: str, model: str, optimizer: str, rounds: int, steps: int) -> tuple[list[float], float]:
    """Runs on every rank; the seconds of a step, by round, and the MB that it has added to this process."""
    import torch
    from torch import distributed
    from torch.nn.functional import cross_entropy

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    if side in (DDP, ZERO):
        import hvd_cluster.torch.distributed  # noqa: F401 - for hvd://

        distributed.init_process_group("gloo", init_method="hvd://")
    before = resident()
    net, step_of = _sides(side, MODELS[model][0](), optimizer)
    torch.manual_seed(2 + hvd.rank())
    batch = MODELS[model][1]()
    labels, seconds = torch.randint(0, 10, batch.shape[:1]), []
    for _ in range(rounds + 1):
        hvd.barrier()
        begin = perf_counter()
        for _ in range(steps):
            step_of.zero_grad()
            cross_entropy(net(batch), labels).backward()
            step_of.step()
        seconds.append((perf_counter() - begin) / steps)
    hvd.barrier()
    added = resident() - before
    hvd.barrier()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    hvd.shutdown()
    return seconds[1:], added


def take_turns(
    sides: Sequence[str], ranks: int, model: str, optimizer: str, arguments: argparse.Namespace
) -> Iterator[tuple[str, list[float], float]]:
    """A job of each side, one after the other: the seconds of its steps, by round, and the MB of all its ranks."""
    for side in sides:
        given = (side, model, optimizer, arguments.rounds, arguments.steps)
        environment = {**os.environ, **({} if arguments.default_malloc else MALLOC)}
        found = hvd_cluster.run(measure, given, num_proc=ranks, env=environment)
        yield side, found[0][0], sum(added for _, added in found)


def records(ranks: int, model: str, optimizer: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each side."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    memory: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.launches):
        for side, of_steps, added in take_turns(SIDES, ranks, model, optimizer, arguments):
            seconds[side].extend(of_steps)
            memory[side].append(added)
    median = {side: statistics.median(values) for side, values in seconds.items()}
    return [
        {
            "model": model,
            "optimizer": optimizer,
            "ranks": ranks,
            "side": side,
            "ms a step": median[side] * 1e3,
            "of no exchange": median[NONE] / median[side],
            "of ours": median[OURS] / median[side],
            "MB of the host": statistics.median(memory[side]),
            "of the MB of ours": statistics.median(memory[side]) / statistics.median(memory[OURS]),
        }
        for side in SIDES
    ]


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """--ranks, --models, --rounds, --steps, --launches and --json: the jobs, and how long each one is."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=["MLP", "ResNet-18", "transformer"], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5, help="rows of steps (default: 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a row (default: 10)")
    parser.add_argument("--default-malloc", action="store_true", help="do not set GLIBC_TUNABLES")
    add_launches_argument(parser, 3)
    add_json_argument(parser)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["SGD", "AdamW", "AdamW, fused"], metavar="NAME")
    add_job_arguments(parser)
    arguments = parser.parse_args()
    found = [
        record
        for ranks in arguments.ranks
        for model in arguments.models
        for optimizer in arguments.optimizers
        for record in records(ranks, model, optimizer, arguments)
    ]
    tabulate("sharded optimizers, medians", found, arguments)


if __name__ == "__main__":
    from benchmarks.sharded import main as importable_main

    importable_main()
