"""A training step beside processes that keep cores busy: DistributedOptimizer and DistributedDataParallel on Gloo.

    python -m benchmarks.beside --ranks 2 4 --busy 0 1 2
    python -m benchmarks.beside --models MLP --launches 1

The sides are jobs of their own, turn by turn: DistributedOptimizer, the same with sharded=True, and
DistributedDataParallel. float32, SGD with momentum, one compute thread a rank. A busy process computes in an endless
loop on one core; it ends with its turn, also when a job fails, and by itself when the benchmark is gone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.measure import tabulate
from benchmarks.sharded import DDP, OURS, SHARDED, add_job_arguments, take_turns

SIDES = (OURS, SHARDED, DDP)
OPTIMIZER = "SGD"
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that keep a core busy each, as many as ``count`` says, while the block runs."""
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())])
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def records(ranks: int, model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of busy processes and each side; launches give them their turns in different orders."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for launch in range(arguments.launches):
        first = launch % len(arguments.sides)
        sides = arguments.sides[first:] + arguments.sides[:first]
        for busy in arguments.busy:
            with busy_processes(busy):
                for side, of_steps, _ in take_turns(sides, ranks, model, OPTIMIZER, arguments):
                    seconds[busy, side].extend(of_steps)
    median = {case: statistics.median(values) for case, values in seconds.items()}
    return [
        {
            "model": model,
            "ranks": ranks,
            "busy processes": busy,
            "side": side,
            "ms a step": median[busy, side] * 1e3,
            "speed of DDP's": median[busy, DDP] / median[busy, side],
        }
        for busy in arguments.busy
        for side in SIDES
        if side in arguments.sides
    ]


def verdict(found: list[dict[str, Any]]) -> str:
    """The cases that are slower than DistributedDataParallel."""
    slower = [
        f"{each['model']}, {each['ranks']} ranks, {each['busy processes']} busy, {each['side']}"
        for each in found
        if each["speed of DDP's"] < 1.0
    ]
    return "no case below the speed of DDP" if not slower else "below the speed of DDP: " + "; ".join(slower)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="busy processes (default: 0 1 2)")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES, help="beside DDP (default: all)")
    add_job_arguments(parser)
    parser.set_defaults(ranks=[2, 4])
    arguments = parser.parse_args()
    arguments.sides = [side for side in SIDES if side in {*arguments.sides, DDP}]
    found = [
        record for ranks in arguments.ranks for model in arguments.models for record in records(ranks, model, arguments)
    ]
    tabulate("training beside busy processes, medians", found, arguments, [verdict(found)])


if __name__ == "__main__":
    from benchmarks.beside import main as importable_main

    importable_main()
