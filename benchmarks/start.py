"""How long an import and the start of a job take: ours, and torch's.

    python -m benchmarks.start --ranks 2

Each launch starts the commands of all cases afresh, in turns. A case compares two commands: two imports, or one job
under hvdrun and under torchrun. ``seconds`` are those from the start of the command to its end, ``CPU`` those that all
its processes worked together. The table has the medians over the launches, and of their differences.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from benchmarks.defaults import ROOT, UNSET
from benchmarks.measure import add_json_argument, add_launches_argument, tabulate

LAUNCH_SECONDS = 120.0
END = "import os; os._exit(0)"
"""So that an import does not count the end of Python, where it frees all objects, but not with ours."""
OURS = """
import torch
import hvd_cluster.torch as hvd

hvd.init()
assert hvd.allreduce(torch.ones(4), op=hvd.Sum)[0] == hvd.size()
"""
PEER = """
import torch
from torch import distributed

distributed.init_process_group("gloo")
ones = torch.ones(4)
distributed.all_reduce(ones)
assert ones[0] == distributed.get_world_size()
distributed.destroy_process_group()
"""


class Case(NamedTuple):
    """Two commands for the same purpose."""

    title: str
    ours: list[str]
    peer: list[str]


class Cost(NamedTuple):
    """The seconds of one command, and those of CPU of its processes."""

    wall: float
    cpu: float


def cases(ranks: int, folder: Path) -> list[Case]:
    """The cases. The scripts are written into ``folder``."""
    python = [sys.executable, "-c"]
    return [
        Case("import hvd_cluster; nothing", [*python, f"import hvd_cluster; {END}"], [*python, END]),
        Case(
            "torch and hvd_cluster.torch; torch",
            [*python, f"import torch, hvd_cluster.torch; {END}"],
            [*python, f"import torch; {END}"],
        ),
        _job(f"{ranks} ranks that do nothing", ranks, folder / "nothing.py", "", ""),
        _job(f"{ranks} ranks until the first allreduce is done", ranks, folder / "allreduce.py", OURS, PEER),
    ]


def _job(title: str, ranks: int, script: Path, ours: str, peer: str) -> Case:
    other = script.with_stem(f"{script.stem}_peer")
    script.write_text(ours)
    other.write_text(peer)
    module = [sys.executable, "-m"]
    return Case(
        title,
        [*module, "hvd_cluster", "-np", str(ranks), sys.executable, str(script)],
        [*module, "torch.distributed.run", "--nproc-per-node", str(ranks), str(other)],
    )


def launch(command: Sequence[str]) -> Cost:
    """Run ``command`` once. Raises CalledProcessError where it failed."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    begin, before = perf_counter(), _worked()
    subprocess.run(command, env=environment, check=True, timeout=LAUNCH_SECONDS, capture_output=True)
    return Cost(perf_counter() - begin, _worked() - before)


def _worked() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(case: Case, launches: int) -> dict[str, object]:
    """The record of a case. The first launch of each side only fills the caches of files."""
    pairs = [(launch(case.ours), launch(case.peer)) for _ in range(launches + 1)][1:]
    ours, peer = ([pair[side] for pair in pairs] for side in (0, 1))
    return {
        "case": case.title,
        "seconds, ours": statistics.median(cost.wall for cost in ours),
        "peer": statistics.median(cost.wall for cost in peer),
        "difference": statistics.median(one.wall - other.wall for one, other in pairs),
        "CPU, ours": statistics.median(cost.cpu for cost in ours),
        "CPU, peer": statistics.median(cost.cpu for cost in peer),
        "CPU, difference": statistics.median(one.cpu - other.cpu for one, other in pairs),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default: 2)")
    add_launches_argument(parser, 7)
    add_json_argument(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as folder:
        records = [measure(case, arguments.launches) for case in cases(arguments.ranks, Path(folder))]
    tabulate("imports, and jobs under hvdrun and torchrun; medians", records, arguments)


if __name__ == "__main__":
    main()
