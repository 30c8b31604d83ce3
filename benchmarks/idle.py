"""The cost of idle ranks: CPU time and wake-ups of whole processes, after a few allreduces.

    python -m benchmarks.idle --seconds 10

The processes first have the engine alone, then a model and its DistributedOptimizer, too, which has taken a few steps.
With HOROVOD_CYCLE_TIME set the engine is never patient, as where cores are plenty. Percentages are of one core.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import hvd_cluster
from benchmarks.measure import add_json_argument, tabulate

SETTINGS: tuple[dict[str, str], ...] = ({}, {"HOROVOD_CYCLE_TIME": "1"})


def measure(seconds: float) -> list[dict[str, Any]]:
    """Runs on every rank; the cost of this rank, with the engine alone and with an optimizer."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    for _ in range(10):
        hvd.allreduce(torch.ones(1000), name="idle")
    records = [{"alive": "engine", **_idle(seconds)}]
    step = _training()
    for _ in range(10):
        step()
    records.append({"alive": "engine and optimizer", **_idle(seconds)})
    hvd.barrier()  # because a shutdown ends the engine on all ranks
    hvd.shutdown()
    return records


def _training() -> Any:
    import torch

    import hvd_cluster.torch as hvd
    from benchmarks.training import build, stepper

    model = build([784, 256, 10])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    return stepper(model, optimizer, torch.randn(32, 784), torch.randint(0, 10, (32,)))


def _idle(seconds: float) -> dict[str, Any]:
    """Sleep; the process's CPU time, and the wake-ups per second of the threads that had some."""
    wakes, begin = _wake_ups(), time.process_time()
    time.sleep(seconds)
    used, now = time.process_time() - begin, _wake_ups()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    rates = {names.get(id, str(id)): (now[id] - wakes.get(id, 0)) / seconds for id in now}
    return {"percent": 100.0 * used / seconds, "wakes": {name: rate for name, rate in rates.items() if rate >= 0.5}}


def _wake_ups() -> dict[int, int]:
    """How often each thread of this process has given up its core, to wait."""
    return {int(task.name): _voluntary_switches(task) for task in Path("/proc/self/task").iterdir()}


def _voluntary_switches(task: Path) -> int:
    lines = (task / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def launch(ranks: int, seconds: float, settings: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each state: the rank that cost most."""
    results = hvd_cluster.run(measure, (seconds,), num_proc=ranks, env=settings)
    rows = []
    for states in zip(*results, strict=True):
        worst = max(states, key=lambda state: state["percent"])
        wakes = ", ".join(f"{name} {rate:.1f}/s" for name, rate in worst["wakes"].items())
        shown = " ".join(f"{name}={value}" for name, value in settings.items()) or "default"
        percents = [state["percent"] for state in states]
        rows.append(
            {
                "ranks": ranks,
                "settings": shown,
                "alive": worst["alive"],
                "worst rank, %": max(percents),
                "mean, %": sum(percents) / len(percents),
                "threads that wake": wakes or "none",
            }
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes (default: 2)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to be idle (default: 10)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows = [
        row for ranks in arguments.ranks for settings in SETTINGS for row in launch(ranks, arguments.seconds, settings)
    ]
    tabulate(f"idle for {arguments.seconds:g} s", rows, arguments)


if __name__ == "__main__":
    from benchmarks.idle import main as importable_main

    importable_main()
