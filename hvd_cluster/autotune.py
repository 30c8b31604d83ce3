"""Autotuning: ``python -m hvd_cluster.autotune plot LOG`` draws the search that HOROVOD_AUTOTUNE_LOG has written."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives import journal
from hvd_cluster.core.basics import is_tuning

__all__ = ["is_tuning", "main", "plot"]

SHOWN = {
    "tensor_fusion_threshold": "fusion threshold, bytes",
    "cycle_time_ms": "cycle time, ms",
    "patience_ms": "patience, ms",
    "pipeline_piece": "piece of a pipeline, bytes",
}


class LogError(Exception):
    """The log cannot be drawn; says why."""


def plot(log: Path, picture: Path) -> None:
    """Draw the trials of ``log`` into the file ``picture``, in the format of its suffix, such as .png or .svg.

    The first panel has the score of each trial in the order of time. Each of the others has the scores over one
    parameter that was tried with several values. The choice is marked, if there is one yet. Raises
    LogError for a file that is no such log, OSError for one that cannot be read or written, ImportError without
    matplotlib.
    """
    rows = _read(log)
    varied = [name for name in SHOWN if len({row[name] for row in rows}) > 1]
    figure, panels = _figure(1 + len(varied))
    scores = [row["score"] for row in rows]
    trials = len(rows) - (rows[-1]["choice"] == 1)
    _panel(panels[0], range(1, len(rows) + 1), scores, trials, "trial")
    for panel, name in zip(panels[1:], varied, strict=True):
        _panel(panel, [row[name] for row in rows], scores, trials, SHOWN[name])
        panel.set_xscale("log")
    panels[-1].legend()
    figure.savefig(picture, dpi=120)


def _read(log: Path) -> list[dict[str, float]]:
    with log.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != journal.COLUMNS:
            raise LogError(f"{log} is not a log of autotuning: its first line is not {','.join(journal.COLUMNS)}")
        try:
            rows = [{name: float(value) for name, value in row.items()} for row in reader]
        except (TypeError, ValueError) as error:
            raise LogError(f"{log} has a row that is not complete, perhaps because it is written now") from error
    if not rows:
        raise LogError(f"{log} has no trials yet; let the job run for longer")
    return rows


def _figure(number: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "hvd-cluster"  # the same file from the same figures
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, number, figsize=(4.0 * number, 3.4), sharey=True, squeeze=False)
    figure.set_layout_engine("tight")
    panels[0][0].set_ylabel("score, bytes per microsecond")
    return figure, list(panels[0])


def _panel(panel: Any, places: Sequence[float], scores: Sequence[float], trials: int, label: str) -> None:
    panel.scatter(places[:trials], scores[:trials], s=18, label="trial")
    panel.scatter(places[trials:], scores[trials:], s=90, marker="*", color="black", label="choice")
    panel.set_xlabel(label)
    panel.grid(alpha=0.3)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hvd_cluster.autotune", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    draw = commands.add_parser("plot", help="draw the search")
    draw.add_argument("log", type=Path, help="the file that HOROVOD_AUTOTUNE_LOG named")
    draw.add_argument("--output", type=Path, metavar="FILE", help="the picture; by default LOG with .png at its end")
    given = parser.parse_args(arguments)
    picture = given.output or given.log.with_suffix(".png")
    try:
        plot(given.log, picture)
    except (LogError, OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    except ImportError as error:
        parser.exit(1, f"{error}; pip install matplotlib\n")
    parser.exit(0, f"{picture}\n")


if __name__ == "__main__":
    main()
