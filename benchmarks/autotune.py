"""Autotuning against the defaults and a grid of parameters: a step of three jobs, in the same processes, turn by turn.

    python -m benchmarks.autotune

A job first trains until its search is over. Then all ranks go through rounds of the defaults, the defaults again, the
choice, and each point of a grid, in another order each time. The first half of the rounds says which point of the grid
is best; the second half has the times, so that chance does not choose a point by the times that are compared. Ratios
are medians over these rounds. The ratio of the defaults to themselves is the noise, which the goals allow.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.measure import add_json_argument, tabulate
from benchmarks.timeline import exchange, train
from tests.hvd_cluster.torch.pool import Pool
from tests.namespaces import HOSTS, WIRE, Network, Unavailable

GOAL_RATIO = 1.05
NOISE_RATIO = 1.02
AGAIN = "defaults again"
SETTLING_STEPS = 6
SEARCH_SECONDS = 60.0
"""A part of a search; the pool waits for longer."""
SEARCH_STEPS = 10
BATCH_SIZE = 32
TENSORS, ELEMENTS = 200, 5000
WAYS = ({"patient": True, "cycle_time": 0.05}, {"patient": False, "cycle_time": 0.001})
THRESHOLDS = (1 << 20, 8 << 20, 128 << 20)
JOB: dict[str, Any] = {}
"""The state of a rank between calls of the pool."""
PIECES = (1 << 19, 1 << 21, 1 << 23)


@dataclass(frozen=True)
class Case:
    """``hosts`` of the ranks, and the widths of an MLP; without widths, a step exchanges many small tensors."""

    name: str
    hosts: tuple[str, ...]
    widths: tuple[int, ...] = ()


CASES = (
    Case("MLP of 23 MB", ("here",) * 2, (784, 2048, 2048, 10)),
    Case(f"{TENSORS} tensors of 20 KB", ("here",) * 2),
    Case("2 x 2 ranks on two hosts", tuple(host for host in HOSTS for _ in range(2)), (784, 256, 10)),
)


def begin(widths: tuple[int, ...], log: str, most: int) -> None:
    """Runs on every rank, like the next two: connects, and makes the step of the case."""
    import gc
    import os

    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    given = {"": "1", "_LOG": log, "_BAYES_OPT_MAX_SAMPLES": str(most), "_STEPS_PER_SAMPLE": str(SEARCH_STEPS)}
    os.environ.update({f"HOROVOD_AUTOTUNE{name}": value for name, value in given.items()})
    hvd.init()
    JOB["step"] = train(list(widths), BATCH_SIZE) if widths else exchange(TENSORS, ELEMENTS)
    gc.collect()
    gc.freeze()  # a full collection takes as long as ten steps, and would be most of a difference


def search(seconds: float) -> bool:
    """Trains for so long; returns whether the search goes on."""
    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.core import basics

    state, end = torch.tensor([1.0, 1.0]), time.monotonic() + seconds
    while bool(state.all()):
        for _ in range(SEARCH_STEPS):
            JOB["step"]()
        state = torch.tensor([float(basics.is_tuning()), float(time.monotonic() < end)])
        hvd.broadcast_(state, 0, name="state")
    return bool(state[0])


def compare(points: Mapping[str, Mapping[str, Any]], steps: int) -> dict[str, float]:
    """The seconds of a step under each of ``points``."""
    import hvd_cluster.torch as hvd
    from hvd_cluster.core import basics

    step, seconds = JOB["step"], {}
    for name, changes in points.items():
        if hvd.rank() == 0:
            basics.engine().propose(**changes)
        for _ in range(SETTLING_STEPS):
            step()
        begin = time.monotonic()
        for _ in range(steps):
            step()
        seconds[name] = (time.monotonic() - begin) / steps
    return seconds


def grid(first: Mapping[str, Any], has_stages: bool) -> dict[str, dict[str, Any]]:
    """The points of the grid, by their names."""
    points = {}
    for way, threshold, piece in product(WAYS, THRESHOLDS, PIECES if has_stages else [first["pipeline_piece"]]):
        changes = {**way, "fusion_threshold": threshold, "pipeline_piece": piece}
        points[", ".join(f"{name} {value}" for name, value in changes.items())] = {**first, **changes}
    return points


def measure(case: Case, pool: Pool, arguments: argparse.Namespace) -> tuple[dict[str, object], str]:
    """The row of a case, and a note of what was chosen and what was best."""
    from collectives.api import Parameters

    with tempfile.TemporaryDirectory() as folder:
        pool.run(begin, case.widths, str(Path(folder, "log.csv")), arguments.trials)
        start = time.monotonic()
        while pool.run(search, SEARCH_SECONDS)[0]:
            pass
        searched = time.monotonic() - start
        rows = _parameters(Path(folder, "log.csv"))
    if not rows[-1].pop("choice"):
        raise SystemExit("the search has failed: its log has no choice; see the warning above")
    for row in rows[:-1]:
        del row["choice"]
    fields = {name: getattr(Parameters(), name) for name in rows[0]}
    points = {
        "defaults": rows[0],
        AGAIN: rows[0],
        "choice": rows[-1],
        **grid({**fields, **rows[0]}, len(set(case.hosts)) > 1),
    }
    seconds = _rounds(pool, points, arguments)
    half = arguments.rounds // 2
    best = min(list(points)[3:], key=_median_of(seconds, slice(0, half)))
    time_of = _median_of(seconds, slice(half, None))
    to_defaults, to_best = [_ratio(seconds, "choice", other, half) for other in ("defaults", best)]
    again = _ratio(seconds, AGAIN, "defaults", half)
    noise = max(again, 1 / again)
    met = to_defaults <= NOISE_RATIO * noise and to_best <= GOAL_RATIO * noise
    record: dict[str, object] = {
        "case": case.name,
        "defaults": time_of("defaults") * 1e3,
        "tuned": time_of("choice") * 1e3,
        "grid": time_of(best) * 1e3,
        "noise": noise,
        "tuned / defaults": to_defaults,
        "tuned / grid": to_best,
        "search, s": searched,
        "met": "yes" if met else "NO",
    }
    chosen = ", ".join(f"{name} {value}" for name, value in points["choice"].items() if value != rows[0][name])
    return record, f"{case.name}: chosen: {chosen or 'the defaults'}; best of the grid: {best}"


def _rounds(
    pool: Pool, points: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in points}
    chance = random.Random(0)
    for _ in range(arguments.rounds):
        shuffled = dict(chance.sample(list(points.items()), len(points)))
        for name, taken in pool.run(compare, shuffled, arguments.steps)[0].items():
            seconds[name].append(taken)
    return seconds


def _ratio(seconds: Mapping[str, list[float]], of: str, to: str, first: int) -> float:
    """The median ratio of two points in the same round, from the round ``first`` on."""
    return statistics.median([one / other for one, other in zip(seconds[of], seconds[to], strict=True)][first:])


def _median_of(seconds: Mapping[str, list[float]], part: slice) -> Callable[[str], float]:
    return lambda name: statistics.median(seconds[name][part])


def _parameters(log: Path) -> list[dict[str, Any]]:
    """The parameters of each row of the log."""
    import csv

    rows = csv.DictReader(log.read_text().splitlines())
    return [
        {
            "fusion_threshold": int(row["tensor_fusion_threshold"]),
            "cycle_time": float(row["cycle_time_ms"]) / 1e3,
            "patience": float(row["patience_ms"]) / 1e3,
            "patient": row["patient"] == "1",
            "cache_capacity": 1024 * int(row["cache_enabled"]),
            "pipeline_piece": int(row["pipeline_piece"]),
            "hierarchical_allreduce": row["hierarchical_allreduce"] == "1",
            "hierarchical_allgather": row["hierarchical_allgather"] == "1",
            "choice": row["choice"] == "1",
        }
        for row in rows
    ]


def run(case: Case, arguments: argparse.Namespace) -> tuple[dict[str, object], str]:
    """One case, on hosts of its own where it has several."""
    if len(set(case.hosts)) == 1:
        return _run(Pool(len(case.hosts), list(case.hosts), {}, None), case, arguments)
    with Network() as network:
        return _run(Pool(len(case.hosts), list(case.hosts), {"GLOO_SOCKET_IFNAME": WIRE}, network), case, arguments)


def _run(pool: Pool, case: Case, arguments: argparse.Namespace) -> tuple[dict[str, object], str]:
    try:
        return measure(case, pool, arguments)
    finally:
        pool.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=[0, 1, 2], help="numbers of the cases (default: all)")
    parser.add_argument("--trials", type=int, default=20, help="trials of the search (default: 20)")
    parser.add_argument("--rounds", type=int, default=16, help="rounds of the comparison, at least 2 (default: 16)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each point in a round (default: 20)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds} must be at least 2: one half chooses, the other half is measured")
    results = []
    for number in arguments.cases:
        try:
            results.append(run(CASES[number], arguments))
        except Unavailable as reason:
            parser.exit(1, f"no hosts in network namespaces: {reason}\n")
    goal = f"goal: at most {NOISE_RATIO} of the defaults' time and {GOAL_RATIO} of the best point's, times the noise"
    notes = [note for _, note in results]
    tabulate("autotuning: ms a step, medians", [record for record, _ in results], arguments, [goal, *notes])


if __name__ == "__main__":
    from benchmarks.autotune import main as importable_main

    importable_main()
