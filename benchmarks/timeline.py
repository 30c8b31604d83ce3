"""The cost of a timeline: the same steps with and without a recording, interleaved in the same processes.

    python -m benchmarks.timeline --ranks 2

The first case is the training step of benchmarks.training: a batch of 32 images, an MLP 784-2048-2048-10 with 23 MB of
parameters. The second has the same step on an MLP with many small layers, whose gradients are packed; the third sends
many small tensors and computes nothing, the most events in the least time. "processor" compares the time of all cores,
which other work on this machine changes less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time, sleep
from typing import Any

import hvd_cluster
from benchmarks.measure import add_json_argument, add_launches_argument, interleave, tabulate
from benchmarks.training import build, stepper

CASES: dict[str, list[int]] = {"MLP of 23 MB": [784, 2048, 2048, 10], "64 small layers": [128] * 65, "tensors only": []}
GOAL_RATIO = 1.03
CONNECT_SECONDS = 0.5
"""The ranks connect once in a job, but at each of our starts. Both sides rest, because caches are cold after it."""
TENSORS, ELEMENTS = 64, 1024


def measure(widths: list[int], batch: int, repeats: int, folder: str) -> dict[str, list[float]]:
    """Runs on every rank; for each side the seconds of each step, by the clock and on all cores."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    step = train(widths, batch) if widths else exchange()
    path, side = f"{folder}/timeline.json", ["off"]
    cpu: dict[str, list[float]] = {"off cpu": [], "on cpu": []}

    def on() -> None:
        if side[0] == "off":
            hvd.start_timeline(path)
            side[0] = "on"
            sleep(CONNECT_SECONDS)
        timed()

    def off() -> None:
        if side[0] == "on":
            hvd.stop_timeline()
            side[0] = "off"
            sleep(CONNECT_SECONDS)
        timed()

    def timed() -> None:
        begin = process_time()
        step()
        cpu[f"{side[0]} cpu"].append(process_time() - begin)

    seconds = interleave({"off": off, "on": on}, repeats, 20)
    hvd.shutdown()
    return {**seconds, **cpu}


def train(widths: list[int], batch: int) -> Callable[[], None]:
    """A training step."""
    import torch

    import hvd_cluster.torch as hvd

    torch.manual_seed(2 + hvd.rank())
    images, labels = torch.randn(batch, widths[0]), torch.randint(0, widths[-1], (batch,))
    model = build(widths)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return stepper(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), images, labels)


def exchange(number: int = TENSORS, elements: int = ELEMENTS) -> Callable[[], None]:
    """A step of many small tensors."""
    import torch

    import hvd_cluster.torch as hvd

    tensors = [torch.ones(elements) for _ in range(number)]

    def step() -> None:
        handles = [hvd.allreduce_async_(tensor, name=f"tensor {place}") for place, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def launch(case: str, ranks: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Medians and means over all steps of all launches, in milliseconds, and their ratios."""
    seconds: dict[str, list[float]] = {"off": [], "on": [], "off cpu": [], "on cpu": []}
    for _ in range(arguments.launches):
        with tempfile.TemporaryDirectory() as folder:
            given = (CASES[case], arguments.batch_size, arguments.repeats, folder)
            for side, values in hvd_cluster.run(measure, given, num_proc=ranks)[0].items():
                seconds[side] += values
            size = Path(folder, "timeline.json").stat().st_size
    medians = {side: statistics.median(values) * 1e3 for side, values in seconds.items()}
    means = {side: statistics.mean(values) * 1e3 for side, values in seconds.items()}
    ratio = medians["on"] / medians["off"]
    return {
        "case": case,
        "ranks": ranks,
        "off, ms": medians["off"],
        "on, ms": medians["on"],
        "on / off": ratio,
        "means": means["on"] / means["off"],
        "processor": means["on cpu"] / means["off cpu"],
        "bytes a step": size / 21,
        "met": "yes" if ratio <= GOAL_RATIO else "NO",
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    add_launches_argument(parser, 3)
    parser.add_argument("--repeats", type=int, default=10, help="rounds of 20 steps of each side (default: 10)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    records = [launch(case, ranks, arguments) for case in arguments.cases for ranks in arguments.ranks]
    note = f"goal: a training step with a timeline takes at most {GOAL_RATIO} of the time of one without"
    tabulate("timeline: a step, medians", records, arguments, [note])


if __name__ == "__main__":
    from benchmarks.timeline import main as importable_main

    importable_main()
