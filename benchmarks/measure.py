"""Common parts of the benchmarks: interleaving, medians, the report on the terminal, as JSON and as a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

__all__ = [
    "Row",
    "add_json_argument",
    "add_launches_argument",
    "add_report_arguments",
    "combine",
    "in_rows",
    "interleave",
    "rendezvous_file",
    "report",
    "row",
    "slowest",
    "tabulate",
    "torch_gloo",
]

FILE_WIDTH = 140


@dataclass(frozen=True)
class Row:
    """One case: medians of ours, of the peer and, where it was measured, of MPI; ours as a fraction of each.

    ``single`` compares the medians of single calls, where ``ours`` and ``peer`` are times of calls in a row. ``goal``
    is the largest ratio of ours to the peer that is wanted.
    """

    case: str
    ranks: int
    unit: str
    ours: float
    peer: float
    best: float
    mpi: float | None = None
    single: float | None = None
    goal: float | None = None

    @property
    def ratio(self) -> float:
        """ours / peer"""
        return self.ours / self.peer

    @property
    def mpi_ratio(self) -> float | None:
        """ours / mpi"""
        return self.ours / self.mpi if self.mpi else None


def interleave(sides: Mapping[str, Callable[[], None]], repeats: int, block: int) -> dict[str, list[float]]:
    """Seconds per call of each side, in turns: ``repeats`` rounds of ``block`` calls of each, one warm-up round.

    Before each block comes a call that is not timed: it waits for ranks that are still in the other side's last one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, call in sides.items():
            call()
            for _ in range(block):
                begin = perf_counter()
                call()
                if turn:
                    seconds[name].append(perf_counter() - begin)
    return seconds


def torch_gloo(rank: int, size: int, path: str) -> None:
    """torch.distributed on Gloo, the peer, for the same ranks."""
    import torch.distributed as distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )


def rendezvous_file() -> str:
    """A path that does not exist yet, where the peer's ranks find each other."""
    return str(Path(tempfile.mkdtemp(prefix="hvd-benchmark-")) / "store")


def in_rows(seconds: Sequence[float], calls: int) -> list[float]:
    """The time of a call in each row of ``calls`` consecutive ones: that of the row, divided by their number."""
    return [statistics.fmean(seconds[start : start + calls]) for start in range(0, len(seconds), calls)]


def row(case: str, ranks: int, unit: str, seconds: Mapping[str, Sequence[float]], scale: float, calls: int = 1) -> Row:
    """Medians of the sides "ours" and "peer", of calls in rows of ``calls``, multiplied by ``scale``."""
    ours, peer = (statistics.median(in_rows(seconds[side], calls)) for side in ("ours", "peer"))
    single = statistics.median(seconds["ours"]) / statistics.median(seconds["peer"]) if calls > 1 else None
    return Row(case, ranks, unit, ours * scale, peer * scale, min(seconds["ours"]) * scale, single=single)


def slowest(of_ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of a launch: an operation is over when the slowest rank has done it. The rest is that of rank 0."""
    return [
        replace(cases[0], ours=max(case.ours for case in cases), peer=max(case.peer for case in cases))
        for cases in zip(*of_ranks, strict=True)
    ]


def combine(launches: Sequence[Row]) -> Row:
    """The row of a case that was measured in several launches: medians of their medians, and the best of all."""
    return replace(
        launches[0],
        ours=statistics.median(entry.ours for entry in launches),
        peer=statistics.median(entry.peer for entry in launches),
        best=(max if launches[0].unit.endswith("/s") else min)(entry.best for entry in launches),
        mpi=_median_of(entry.mpi for entry in launches),
        single=_median_of(entry.single for entry in launches),
    )


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def add_launches_argument(parser: ArgumentParser, default: int) -> None:
    """--launches"""
    parser.add_argument(
        "--launches", type=int, default=default, help=f"times the processes are started (default: {default})"
    )


def add_json_argument(parser: ArgumentParser) -> None:
    """--json"""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON, too")


def add_report_arguments(parser: ArgumentParser) -> None:
    """--json and --plot"""
    add_json_argument(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios, as PNG or SVG, too")


def report(title: str, rows: Sequence[Row], arguments: Namespace, notes: Sequence[str] = ()) -> None:
    """A table on the terminal, with ``notes`` below; JSON and a plot where asked for.

    It has a column only if some row has a value there, and says which rows reach their goals.
    """
    records = [_record(entry) for entry in rows]
    empty = {key for key in records[0] if all(record[key] is None for record in records)}
    tabulate(f"{title}, medians", [_without(record, empty) for record in records], arguments, notes)
    if arguments.plot:
        _plot(title, rows, arguments.plot)


def _record(entry: Row) -> dict[str, object]:
    met = None if entry.goal is None else "yes" if entry.ratio <= entry.goal else "NO"
    times = _without(asdict(entry), ("single", "goal"))
    ratios = {"ours / peer": entry.ratio, "ours / mpi": entry.mpi_ratio, "single calls": entry.single}
    return {**times, **ratios, "goal": entry.goal, "met": met}


def _without(record: Mapping[str, object], keys: Container[str]) -> dict[str, object]:
    return {key: value for key, value in record.items() if key not in keys}


def tabulate(
    title: str, records: Sequence[Mapping[str, object]], arguments: Namespace, notes: Sequence[str] = ()
) -> None:
    """Records of the same keys as a table on the terminal, with ``notes`` below, and as JSON where asked for."""
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=2))
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # on a machine that has only what a job needs
        lines = [title, "\t".join(records[0]), *("\t".join(map(_cell, record.values())) for record in records), *notes]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    table = Table(title=f"{title} ({os.cpu_count()} cores, {platform.machine()})", caption=Text("\n".join(notes)))
    for heading, value in records[0].items():
        is_text = isinstance(value, str)
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for record in records:
        table.add_row(*map(_cell, record.values()))
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def _plot(title: str, rows: Sequence[Row], path: Path) -> None:
    """A panel for each number of ranks, a bar for each case: our time as a fraction of the peer's."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "hvd-cluster"  # the same file from the same figures
    from matplotlib import pyplot

    counts = sorted({entry.ranks for entry in rows})
    cases = list(dict.fromkeys(entry.case for entry in rows))
    size = (3 + 3.5 * len(counts), 1.5 + 0.25 * len(cases))
    figure, panels = pyplot.subplots(1, len(counts), figsize=size, sharey=True, squeeze=False)
    for axes, ranks in zip(panels[0], counts, strict=True):
        _panel(axes, [entry for entry in rows if entry.ranks == ranks])
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{title}: our time / the peer's")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    labels, ratios = [entry.case for entry in rows], [entry.ratio for entry in rows]
    bars = axes.barh(labels, ratios, color="#2a6f97", label="ours / peer")
    axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
    if any(entry.mpi for entry in rows):
        axes.plot([entry.mpi_ratio for entry in rows], labels, "D", color="tab:orange", label="ours / mpi")
        axes.legend()
    axes.axvline(1.0, color="black", linewidth=1)
    for goal in {entry.goal for entry in rows if entry.goal is not None}:
        axes.axvline(goal, color="gray", linewidth=1, linestyle="--")
    axes.set_xlim(0, max(1.1, *ratios) * 1.15)
    axes.set_title(f"{rows[0].ranks} ranks")
