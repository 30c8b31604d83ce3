"""The ranks of one elastic job over time, as a picture.

    python -m benchmarks.members --plot docs/elastic.svg

The job begins with three ranks. One is killed, another one comes after the cool-down of a second, one is asked to end,
and another one is killed. Each process is a bar from its first step to its last one; the table has the same figures.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic import STEP_SECONDS, Job, Step, running_job
from benchmarks.measure import add_json_argument, tabulate

RANKS = 3
APART_SECONDS = 1.5
COLOURS = {signal.SIGKILL: "tab:red", signal.SIGTERM: "tab:orange"}


@dataclass(frozen=True)
class Event:
    """A signal to a process, at ``time``."""

    name: str
    time: float
    kind: signal.Signals


@dataclass(frozen=True)
class Member:
    """A process that trained from ``first`` to ``last``, in seconds since the first step of the job."""

    name: str
    first: float
    last: float


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=STEP_SECONDS, help=f"seconds a step (default: {STEP_SECONDS})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the members, as PNG or SVG")
    add_json_argument(parser)
    arguments = parser.parse_args()
    with running_job("ours", RANKS, arguments, "--blacklist-cooldown-range", "1", "1") as job:
        events = _disturb(job)
        steps = job.steps()
    start = min(each[0].time for each in steps.values() if each)
    members = _members(steps, start)
    records = [{"process": each.name, "first step": each.first, "last step": each.last} for each in members]
    tabulate("The ranks of an elastic job, s", records, arguments)
    if arguments.plot:
        _plot(members, [Event(event.name, event.time - start, event.kind) for event in events], arguments.plot)


def _disturb(job: Job) -> list[Event]:
    job.await_calm(RANKS)
    events = [Event("kill -9", job.signal(1, signal.SIGKILL), signal.SIGKILL)]
    job.await_calm(RANKS)
    events.append(Event("SIGTERM", job.signal(0, signal.SIGTERM), signal.SIGTERM))
    job.await_calm(RANKS - 1, since=events[-1].time + APART_SECONDS)
    events.append(Event("kill -9", job.signal(1, signal.SIGKILL), signal.SIGKILL))
    job.await_calm(RANKS - 1, since=events[-1].time + APART_SECONDS)
    return events


def _members(steps: dict[int, list[Step]], start: float) -> list[Member]:
    order = sorted((each for each in steps.values() if each), key=lambda each: each[0].time)
    return [
        Member(f"process {number}", each[0].time - start, each[-1].time - start) for number, each in enumerate(order)
    ]


def _plot(members: Sequence[Member], events: Sequence[Event], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "hvd-cluster"  # the same file from the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.45 * len(members)))
    _draw(axes, members, events)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axes: Any, members: Sequence[Member], events: Sequence[Event]) -> None:
    names = [member.name for member in members]
    lengths = [member.last - member.first for member in members]
    axes.barh(names, lengths, left=[member.first for member in members], color="#2a6f97", height=0.6)
    for event in events:
        axes.axvline(event.time, color=COLOURS[event.kind], linewidth=1)
        axes.annotate(event.name, (event.time, -0.75), color=COLOURS[event.kind], fontsize=8, annotation_clip=False)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first step")


if __name__ == "__main__":
    main()
