"""The cost of metrics, which are always on: the same steps with and without counting, in turns in one process.

    python -m benchmarks.metrics --ranks 2

The cases are those of benchmarks.timeline, and one small tensor at a time, the shortest operation. Without counting,
nothing takes the place of the engine's tally. "wall" and "processor" are the differences of a step with and without,
which other work on the machine changes more than counting does. So "counting" is measured inside of the steps: the time
in the tally. "clock" is the time of the looks at the clock in the crossings of the gate in shared memory, two in each,
which both sides have. "share" is the part of a step of these two.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Callable
from time import monotonic, perf_counter, process_time
from typing import Any

import hvd_cluster
from benchmarks.measure import add_json_argument, add_launches_argument, interleave, tabulate
from benchmarks.timeline import CASES as TIMELINE_CASES
from benchmarks.timeline import exchange, train

CASES: dict[str, list[int] | None] = {**TIMELINE_CASES, "one small tensor": None}
GOAL_SHARE = 0.005


class NoTally:
    """Counts nothing."""

    def begin(self, *_: object) -> None:
        return

    begin_trial = decided = drop = end = failed = keep = begin


class TimedTally:
    """Counts in ``tally``, and measures the time that this takes."""

    def __init__(self, tally: Any) -> None:
        self.seconds = 0.0
        for name in ("begin", "begin_trial", "decided", "drop", "end", "failed", "keep"):
            setattr(self, name, self._timed(getattr(tally, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            begin = perf_counter()
            method(*args)
            self.seconds += perf_counter() - begin

        return timed


def measure(widths: list[int] | None, batch: int, repeats: int) -> dict[str, list[float]]:
    """Runs on every rank; for each side the seconds of each step, by the clock and on all cores."""
    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.core import basics

    torch.set_num_threads(1)
    hvd.init()
    step = _small() if widths is None else train(widths, batch) if widths else exchange()
    runner: Any = basics.engine()._parts.runner
    clock = TimedTally(runner._tally)
    tallies = {"off": NoTally(), "on": runner._tally, "timed": clock}
    cpu: dict[str, list[float]] = {f"{name} cpu": [] for name in tallies}
    counting: list[float] = []

    def side(name: str) -> Callable[[], None]:
        def timed() -> None:
            runner._tally = tallies[name]
            begin, before = process_time(), clock.seconds
            step()
            cpu[f"{name} cpu"].append(process_time() - begin)
            if name == "timed":
                counting.append(clock.seconds - before)

        return timed

    seconds = interleave({name: side(name) for name in tallies}, repeats, 20)
    runner._tally = tallies["on"]
    crossings = _crossings(runner, step)
    hvd.shutdown()
    return {**seconds, **cpu, "counting": counting, "crossings": [crossings]}


def _small() -> Callable[[], None]:
    import torch

    import hvd_cluster.torch as hvd

    tensor = torch.ones(16)
    return lambda: hvd.allreduce_(tensor, name="small")


def _crossings(runner: Any, step: Callable[[], None]) -> float:
    """The crossings of the gate in a step; 0 on a backend without one."""
    gates = [gate for gate in (getattr(backend, "_gate", None) for backend in runner.backends()) if gate]
    before = [gate._epoch for gate in gates]
    step()
    return float(sum(gate._epoch - old for gate, old in zip(gates, before, strict=True)))


def launch(case: str, ranks: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Over all steps of all launches: medians in milliseconds, the differences in microseconds, and their share."""
    values: dict[str, list[float]] = {}
    for _ in range(arguments.launches):
        given = (CASES[case], arguments.batch_size, arguments.repeats)
        for side, found in hvd_cluster.run(measure, given, num_proc=ranks)[0].items():
            values.setdefault(side, []).extend(found)
    step = statistics.median(values["off"])
    wall = statistics.median(values["on"]) - step
    cpu = _trimmed(values["on cpu"]) - _trimmed(values["off cpu"])
    clock = statistics.median(values["crossings"]) * 2 * timeit.timeit(monotonic, number=100_000) / 100_000
    counting = statistics.median(values["counting"])
    share = (counting + clock) / step
    return {
        "case": case,
        "ranks": ranks,
        "step, ms": step * 1e3,
        "wall, us": wall * 1e6,
        "processor, us": cpu * 1e6,
        "counting, us": counting * 1e6,
        "clock, us": clock * 1e6,
        "share, %": share * 100,
        "met": ("yes" if share <= GOAL_SHARE else "NO") if CASES[case] else "-",
    }


def _trimmed(values: list[float]) -> float:
    """The mean without the tenth at each end."""
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    add_launches_argument(parser, 3)
    parser.add_argument("--repeats", type=int, default=20, help="rounds of 20 steps of each side (default: 20)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    records = [launch(case, ranks, arguments) for case in arguments.cases for ranks in arguments.ranks]
    note = f"goal: counting takes at most {GOAL_SHARE:.1%} of a training step"
    tabulate("metrics: a step with and without", records, arguments, [note])


if __name__ == "__main__":
    from benchmarks.metrics import main as importable_main

    importable_main()
