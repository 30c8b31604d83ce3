"""An allreduce of float32 by each backend that works here, side by side: through the engine, on NumPy arrays.

    python -m benchmarks.backends                            # 2 and 4 ranks; two hosts too, for root with iproute2
    python -m benchmarks.backends --page docs/backends.md    # and put the table into that page
    python -m benchmarks.backends --python pygloo=.venv-pygloo/bin/python

The hosts are network namespaces of this machine, joined by a link of 1 Gbit/s. MPI is the Open MPI whose mpirun is on
the PATH. The launches of the backends take turns. A figure is the time of a call in a row of many, in microseconds: the
median of the rows of a launch, on its slowest rank, and the median of the launches.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks.measure import add_json_argument, add_launches_argument, in_rows, interleave, tabulate
from benchmarks.sizes import label, parse_size, turns_for
from collectives.api import Operation
from collectives.backends.registry import Row, rows
from executors.api import ExecutorError
from hvd_cluster import run
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.diagnose.trial import BY_MPIRUN, DEFAULT
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.submission import run as run_operation
from tests.namespaces import ENTER_HOST, HOSTS, RATE, Network, Unavailable

MARKS = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
BY_OPEN_MPI = {"mpi_args": f"--mca plm_rsh_agent {shlex.quote(str(ENTER_HOST))}"}
"""How its mpirun reaches the other host; MPI moves the data by TCP there, and by shared memory inside a host."""


@dataclass(frozen=True)
class Place:
    """``ranks`` processes, spread over two hosts of ``network`` if there is one."""

    ranks: int
    network: Network | None = None

    @property
    def title(self) -> str:
        """The name of the place in the table."""
        if self.network is None:
            return f"1 host, {self.ranks} ranks"
        return f"2 hosts, {self.ranks} ranks"

    def run(self, row: Row, python: str | None, sizes: Sequence[int], scale: float) -> list[float]:
        """The medians of the slowest rank, one a size, by the backend of ``row``. Raises the errors of ``run()``."""
        network, environment = self.network, {row.variable: row.name, "OMP_NUM_THREADS": "1"}
        options = {"env": environment, "executable": python, "use_mpi": True if row.name in BY_MPIRUN else None}
        if network is None:
            return _slowest(run(measure, (sizes, scale), num_proc=self.ranks, **options))
        half = self.ranks // 2
        options["hosts"] = f"localhost:{half},{network.names[HOSTS[1]]}:{half}"
        options |= BY_OPEN_MPI if row.name in BY_MPIRUN else {"remote_shell": "ip netns exec {host}"}
        with network.inside(HOSTS[0]):
            return _slowest(run(measure, (sizes, scale), num_proc=self.ranks, **options))


def _slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return list(map(max, zip(*of_ranks, strict=True)))


def measure(sizes: Sequence[int], scale: float) -> list[float]:
    """On each rank: the median of the seconds of an allreduce in a row of them, for each of ``sizes`` in bytes."""
    basics.init()
    medians = [_median(nbytes, scale) for nbytes in sizes]
    basics.shutdown()
    return medians


def _median(nbytes: int, scale: float) -> float:
    array, name, turns = np.zeros(nbytes // 4, np.float32), label(nbytes), turns_for(nbytes, scale)

    def call() -> None:
        run_operation(Operation.ALLREDUCE, in_place, array, name, global_process_set)

    array[:] = basics.rank() + 1
    call()
    assert (array == basics.size() * (basics.size() + 1) // 2).all(), f"the sum of {name} is wrong"
    array[:] = 0
    call()
    return statistics.median(in_rows(interleave({name: call}, *turns)[name], turns.calls))


class Figures:
    """The figures of one place, and in ``notes`` the reasons why a backend has none."""

    def __init__(self, place: Place, sizes: Sequence[int]) -> None:
        self._place, self._sizes = place, sizes
        self._medians: dict[str, list[list[float]]] = {}
        self.notes: list[str] = []

    def take(self, row: Row, python: str | None, scale: float) -> None:
        """One launch of the backend of ``row``."""
        medians = self._medians.setdefault(row.name, [])
        if any(note.startswith(f"{row.name}: ") for note in self.notes):
            return
        try:
            medians.append(self._place.run(row, python, self._sizes, scale))
        except (ExecutorError, ImportError, ValueError, RuntimeError) as error:
            self.notes.append(f"{row.name}: {type(error).__name__}: {error}")

    def records(self) -> Iterator[dict[str, object]]:
        """One for each size: the microseconds of each backend, None without a figure."""
        for index, nbytes in enumerate(self._sizes):
            yield {"ranks": self._place.title, "size": label(nbytes)} | {
                name: statistics.median(each[index] for each in launches) * 1e6 if launches else None
                for name, launches in self._medians.items()
            }


def as_markdown(records: Sequence[Mapping[str, object]], notes: Sequence[str], load: float) -> str:
    """The table of a page, with ``notes`` below. ``load`` was the load of the machine before."""
    names = list(records[0])
    head = [f"| {' | '.join(names)} |", "|---|---|" + "---:|" * (len(names) - 2)]
    lines = [f"| {' | '.join(_cell(value) for value in record.values())} |" for record in records]
    machine = f"{os.cpu_count()} cores of {platform.machine()}, {date.today()}"
    about = f"Microseconds; {machine}; load {load:.1f} before the first launch; hosts are joined at {RATE}."
    said = [f"* {note}" for note in notes]
    return "\n".join([about, "", *head, *lines, "", *said]).strip() + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def write_into(page: Path, text: str) -> None:
    """Put ``text`` between the MARKS of ``page``."""
    begin, end = map(re.escape, MARKS)
    found = re.compile(f"(?<={begin}).*(?={end})", re.DOTALL)
    before = page.read_text()
    if not found.search(before):
        sys.exit(f"{page} has no lines {MARKS[0].strip()} and {MARKS[1].strip()}")
    page.write_text(found.sub(lambda _: text, before))


def _python_of(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if not python or name not in [row.name for row in rows()]:
        raise argparse.ArgumentTypeError(f"{text!r} is not BACKEND=/path/to/python")
    return name, python


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="processes on one host (default: 2 4)")
    parser.add_argument("--host-ranks", type=int, nargs="*", default=[2, 4], help="on two hosts (default: 2 4)")
    parser.add_argument(
        "--backends", nargs="+", choices=[row.name for row in rows() if row.device == "cpu"], help="default: all"
    )
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[32, 64 << 10, 1 << 20, 16 << 20],
        help="bytes of the arrays (default: 32 64K 1M 16M)",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of repetitions (default: 1)")
    parser.add_argument(
        "--python", type=_python_of, action="append", default=[], help="BACKEND=PYTHON: another Python for its ranks"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table into this page, too")
    add_launches_argument(parser, 3)
    add_json_argument(parser)
    return parser


def _measured(place: Place, arguments: argparse.Namespace) -> Figures:
    figures, pythons = Figures(place, arguments.sizes), dict(arguments.python)
    chosen = [row for row in rows() if row.device == "cpu" and row.name in (arguments.backends or [row.name])]
    wanted = [row for row in (DEFAULT, *chosen) if place.network is None or row.name != "shm"]
    for _ in range(arguments.launches):
        for row in wanted:
            figures.take(row, pythons.get(row.name), arguments.scale)
    return figures


def main() -> None:
    """The command line."""
    arguments, load = _parser().parse_args(), os.getloadavg()[0]
    figures: list[Figures] = []
    notes: list[str] = []
    figures += [_measured(Place(ranks), arguments) for ranks in arguments.ranks]
    try:
        with Network() if arguments.host_ranks else contextlib.nullcontext() as network:
            figures += [_measured(Place(ranks, network), arguments) for ranks in arguments.host_ranks]
    except Unavailable as reason:
        notes.append(f"no hosts in network namespaces: {reason}")
    notes = list(dict.fromkeys([*notes, *(note for each in figures for note in each.notes)]))
    names = [row.name for row in (DEFAULT, *rows()) if row.device == "cpu"]
    found = [record for each in figures for record in each.records()]
    records = [{key: record.get(key) for key in ("ranks", "size", *names)} for record in found]
    tabulate("allreduce of float32 by each backend, us", records, arguments, notes)
    if arguments.page:
        write_into(arguments.page, as_markdown(records, notes, load))


if __name__ == "__main__":
    from benchmarks.backends import main as importable_main

    importable_main()
