"""A training step of an MLP with DistributedOptimizer against DistributedDataParallel on Gloo, interleaved.

    python -m benchmarks.training --ranks 2
    python -m benchmarks.training --memory
    python -m benchmarks.training --compression

The model is 784-2048-2048-10, the batch 32 images a rank, float32, SGD with momentum, one compute thread a rank. All
sides train in the same processes, turn by turn.

With --memory the sides are ways from ``.grad`` to the engine and back, each at its barest: gradients travel as a group,
in place; or packed into one tensor, whose parts they become; or they live in that tensor all the time.

With --compression the sides are DistributedOptimizers with each of the 16-bit compressors, and with none.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hvd_cluster
from benchmarks.measure import (
    Row,
    add_launches_argument,
    add_report_arguments,
    interleave,
    rendezvous_file,
    report,
    tabulate,
    torch_gloo,
)

WAYS = ("in place", "packed", "views")
COMPRESSORS = ("none", "fp16", "bf16")


def build(widths: list[int]) -> Any:
    """The MLP, the same on every rank and side."""
    import torch

    torch.manual_seed(1)
    layers: list[Any] = []
    for inputs, outputs in pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def stepper(model: Any, optimizer: Any, images: Any, labels: Any) -> Callable[[], None]:
    """One training step."""
    from torch.nn.functional import cross_entropy

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def bare_stepper(model: Any, optimizer: Any, images: Any, labels: Any, way: str) -> Callable[[], None]:
    """One training step, with gradients "in place", "packed" or "views"."""
    import torch
    from torch.nn.functional import cross_entropy

    import hvd_cluster.torch as hvd

    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def adopt() -> None:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    def step() -> None:
        if way == "views":
            flat.zero_()
        else:
            optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        if way == "in place":
            hvd.grouped_allreduce_([parameter.grad for parameter in parameters], name=way)
        else:
            if way == "packed":
                torch._foreach_copy_(views, [parameter.grad for parameter in parameters])
                adopt()
            hvd.allreduce_(flat, name=way)
        optimizer.step()

    if way == "views":
        adopt()
    return step


def measure_memory(widths: list[int], batch: int, repeats: int) -> dict[str, list[float]]:
    """Runs on every rank; for each way the seconds of each step, as this rank sees it."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(2 + hvd.rank())
    images, labels = torch.randn(batch, widths[0]), torch.randint(0, widths[-1], (batch,))
    sides = {}
    for way in WAYS:
        model = build(widths)
        sides[way] = bare_stepper(model, _sgd(model), images, labels, way)
    ours = build(widths)
    wrapped = hvd.DistributedOptimizer(_sgd(ours), named_parameters=ours.named_parameters())
    sides["DistributedOptimizer"] = stepper(ours, wrapped, images, labels)
    seconds = interleave(sides, repeats, 10)
    hvd.shutdown()
    return seconds


def measure_compression(widths: list[int], batch: int, repeats: int) -> dict[str, list[float]]:
    """Runs on every rank; for each compressor the seconds of each step, as this rank sees it."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(2 + hvd.rank())
    images, labels = torch.randn(batch, widths[0]), torch.randint(0, widths[-1], (batch,))
    sides = {}
    for name in COMPRESSORS:
        model = build(widths)
        named = [(f"{name}.{parameter}", value) for parameter, value in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(_sgd(model), named, compression=getattr(hvd.Compression, name))
        sides[name] = stepper(model, optimizer, images, labels)
    seconds = interleave(sides, repeats, 10)
    hvd.shutdown()
    return seconds


def report_ways(
    measure: Callable[[list[int], int, int], dict[str, list[float]]], title: str, arguments: argparse.Namespace
) -> None:
    """A row for each number of ranks, a column for each way: medians over all steps of all launches."""
    records: list[dict[str, object]] = []
    for ranks in arguments.ranks:
        seconds: dict[str, list[float]] = {}
        for _ in range(arguments.launches):
            given = (arguments.widths, arguments.batch_size, arguments.repeats)
            for way, values in hvd_cluster.run(measure, given, num_proc=ranks)[0].items():
                seconds.setdefault(way, []).extend(values)
        medians = {way: statistics.median(values) * 1e3 for way, values in seconds.items()}
        records.append({"case": _case(arguments), "ranks": ranks, **medians})
    tabulate(f"{title}: milliseconds a step, medians", records, arguments)


def measure(widths: list[int], batch: int, repeats: int, path: str) -> dict[str, list[float]]:
    """Runs on every rank; for each side the images/s of all ranks together, step by step, as this rank sees it."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch_gloo(hvd.rank(), hvd.size(), path)
    torch.manual_seed(2 + hvd.rank())
    images, labels = torch.randn(batch, widths[0]), torch.randint(0, widths[-1], (batch,))
    ours, peer = build(widths), torch.nn.parallel.DistributedDataParallel(build(widths))
    wrapped = hvd.DistributedOptimizer(_sgd(ours), named_parameters=ours.named_parameters())
    sides = {"ours": stepper(ours, wrapped, images, labels), "peer": stepper(peer, _sgd(peer), images, labels)}
    seconds = interleave(sides, repeats, 10)
    for mine, theirs in zip(ours.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    ranks = hvd.size()
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return {side: [ranks * batch / value for value in values] for side, values in seconds.items()}


def launch(ranks: int, arguments: argparse.Namespace) -> Row:
    """Medians over all steps of all launches: how fast memory is differs from launch to launch."""
    speeds: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(arguments.launches):
        given = (arguments.widths, arguments.batch_size, arguments.repeats, rendezvous_file())
        for side, values in hvd_cluster.run(measure, given, num_proc=ranks)[0].items():
            speeds[side] += values
    ours, peer = statistics.median(speeds["ours"]), statistics.median(speeds["peer"])
    return Row(_case(arguments), ranks, "images/s", ours, peer, max(speeds["ours"]))


def _case(arguments: argparse.Namespace) -> str:
    widths = arguments.widths
    return "-".join(map(str, widths)) if len(widths) < 6 else f"{len(widths) - 1} layers of up to {max(widths)}"


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--widths", type=int, nargs="+", default=[784, 2048, 2048, 10], help="layers of the MLP")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    add_launches_argument(parser, 5)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of ten steps of each side (default: 5)")
    parser.add_argument("--memory", action="store_true", help="compare ways of gradient memory")
    parser.add_argument("--compression", action="store_true", help="compare 16-bit compression and none")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.memory or arguments.compression:
        if arguments.memory:
            report_ways(measure_memory, "gradient memory", arguments)
        if arguments.compression:
            report_ways(measure_compression, "compression", arguments)
        return
    rows = [launch(ranks, arguments) for ranks in arguments.ranks]
    report("training: ours and DistributedDataParallel on Gloo", rows, arguments)


if __name__ == "__main__":
    from benchmarks.training import main as importable_main

    importable_main()
