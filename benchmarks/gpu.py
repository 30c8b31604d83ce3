"""Collectives and training steps on GPUs against torch's NCCL and DistributedDataParallel, interleaved.

    python -m benchmarks.gpu --ranks 2
    python -m benchmarks.gpu --ranks 8 --json gpu.json

Ranks may share a GPU, see benchmarks/shared_gpu.py. Both sides run in the same processes, turn by turn. Times are of
whole steps, with the GPU; "host" is how long the calls of a step take before it ends. The models are ResNet-50 on
64 x 64 images and a transformer with 4 layers, in float32, SGD, 16 samples a rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hvd_cluster
from benchmarks.measure import Row, add_report_arguments, interleave, rendezvous_file, report, row
from benchmarks.resnet import resnet50
from benchmarks.shared_gpu import claim_host, variables

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]
MILLI, MICRO = 1e3, 1e6


def transformer() -> Any:
    """A small encoder over token numbers, with a classifier at the end."""
    import torch

    class Classifier(torch.nn.Module):
        """Embedding, four layers, the mean over the tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(8192, 512)
            layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = torch.nn.Linear(512, 10)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))

    torch.manual_seed(1)
    return Classifier()


def images() -> Any:
    """A batch for ResNet."""
    import torch

    return torch.randn(16, 3, 64, 64, device="cuda")


def tokens() -> Any:
    """A batch for the transformer."""
    import torch

    return torch.randint(0, 8192, (16, 128), device="cuda")


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "resnet": (lambda: resnet50(1000), images),
    "transformer": (transformer, tokens),
}


def finished(call: Callable[[], object]) -> Callable[[], None]:
    """``call``, and the wait for the GPU."""
    import torch

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def told(entry: Row) -> Row:
    """``entry``, which rank 0 shows at once: the table at the end may come too late for who has little time."""
    import hvd_cluster.torch as hvd

    if hvd.rank() == 0:
        sys.stdout.write(f"{entry.case}: {entry.ours:.4g} {entry.unit}, torch {entry.peer:.4g} {entry.unit}\n")
        sys.stdout.flush()
    return entry


def allreduces(ranks: int) -> list[Row]:
    """One row for each size."""
    import torch
    import torch.distributed as distributed

    import hvd_cluster.torch as hvd

    rows = []
    for nbytes in SIZES:
        ours, theirs = (torch.zeros(nbytes // 4, device="cuda") for _ in range(2))
        sides = {
            "ours": finished(lambda ours=ours: hvd.allreduce_(ours, op=hvd.Sum, name="speed")),
            "peer": finished(lambda theirs=theirs: distributed.all_reduce(theirs)),
        }
        seconds = interleave(sides, 5, 20 if nbytes < 1 << 24 else 4)
        rows.append(told(row(f"allreduce {nbytes >> 10} KB", ranks, "us", seconds, MICRO)))
    return rows


def stepper(model: Any, optimizer: Any, batch: Any) -> Callable[[], None]:
    """One training step, without a wait for the GPU."""
    import torch

    labels = torch.zeros(len(batch), dtype=torch.long, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()

    return step


def trainings(ranks: int) -> list[Row]:
    """Two rows for each model: whole steps, and the time of the host."""
    import torch

    import hvd_cluster.torch as hvd

    rows = []
    for name, (make, sample) in MODELS.items():
        batch, ours, theirs = sample(), make().cuda(), make().cuda()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), 0.01), ours.named_parameters())
        wrapped = torch.nn.parallel.DistributedDataParallel(theirs)
        plain = torch.optim.SGD(theirs.parameters(), 0.01)
        steps = {"ours": stepper(ours, optimizer, batch), "peer": stepper(wrapped, plain, batch)}
        whole = interleave({side: finished(step) for side, step in steps.items()}, 4, 5)
        rows.append(told(row(f"{name} step", ranks, "ms", whole, MILLI)))
        rows.append(told(row(f"{name} host", ranks, "ms", interleave(steps, 5, 2), MILLI)))
    return rows


PARTS = {"allreduce": allreduces, "training": trainings}


def body(path: str, parts: Sequence[Callable[[int], list[Row]]]) -> list[Row]:
    """On every rank."""
    import torch
    import torch.distributed as distributed

    import hvd_cluster.torch as hvd

    claim_host()
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    distributed.init_process_group("nccl", init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size())
    rows = [entry for part in parts for entry in part(hvd.size())]
    torch.cuda.synchronize()
    distributed.destroy_process_group()
    hvd.shutdown()
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: torch sees none, so there is nothing to measure")
    from collectives.backends.nccl.bootstrap import load

    parts = [PARTS[arguments.only]] if arguments.only else list(PARTS.values())
    shared = variables(arguments.ranks, torch.cuda.device_count(), load().version)
    environment = {**shared, **os.environ}
    rows = hvd_cluster.run(body, (rendezvous_file(), parts), num_proc=arguments.ranks, env=environment)[0]
    report("Ours against torch's NCCL", rows, arguments)


if __name__ == "__main__":
    main()
