"""What the benchmarks share: interleaving, medians, the report on the terminal, as JSON and as a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter

__all__ = ["Row", "add_report_arguments", "interleave", "report", "torch_gloo"]


@dataclass(frozen=True)
class Row:
    """One case: medians of ours and of the peer, and ours as a fraction of the peer's."""

    case: str
    ranks: int
    unit: str
    ours: float
    peer: float
    best: float

    @property
    def ratio(self) -> float:
        """ours / peer"""
        return self.ours / self.peer


def interleave(sides: Mapping[str, Callable[[], None]], repeats: int, block: int) -> dict[str, list[float]]:
    """Seconds per call of each side, in turns: ``repeats`` rounds of ``block`` calls of each, one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, call in sides.items():
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


def meeting_file() -> str:
    """A path that does not exist yet, where the peer's ranks find each other."""
    return str(Path(tempfile.mkdtemp(prefix="hvd-benchmark-")) / "store")


def row(case: str, ranks: int, unit: str, seconds: Mapping[str, Sequence[float]], scale: float) -> Row:
    """A row of times: medians of the sides "ours" and "peer", multiplied by ``scale``."""
    ours, peer = statistics.median(seconds["ours"]), statistics.median(seconds["peer"])
    return Row(case, ranks, unit, ours * scale, peer * scale, min(seconds["ours"]) * scale)


def add_report_arguments(parser: ArgumentParser) -> None:
    """--json and --plot"""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios into a PNG file, too")


def report(title: str, rows: Sequence[Row], arguments: Namespace) -> None:
    """A table on the terminal; JSON and a PNG where asked for."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} ({os.cpu_count()} cores, {platform.machine()}, medians)")
    for heading in ("case", "ranks", "unit", "ours", "ours, best", "peer", "ours / peer"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for entry in rows:
        figures = (f"{value:,.1f}" for value in (entry.ours, entry.best, entry.peer))
        table.add_row(entry.case, str(entry.ranks), entry.unit, *figures, f"{entry.ratio:.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([{**asdict(entry), "ratio": entry.ratio} for entry in rows], indent=2))
    if arguments.plot:
        _plot(title, rows, arguments.plot)


def _plot(title: str, rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.4 * len(rows)))
    labels = [f"{entry.case}, {entry.ranks} ranks" for entry in rows]
    axes.barh(labels, [entry.ratio for entry in rows])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("ours / peer")
    axes.set_title(title)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
