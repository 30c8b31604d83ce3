"""Many ranks without a framework on hosts that are network namespaces: start, lost hosts, growth, shutdown.

    python -m benchmarks.many_ranks
    python -m benchmarks.many_ranks --hosts 8 --ranks 16 --rounds 50
    python -m benchmarks.many_ranks --hosts 2 --ranks 2 --rounds 480 --pause 25

An elastic job trains one array in steps of an allreduce, with a commit after each. In a round a host is killed with its
agent, or leaves as planned, in turns, and comes back; training goes on for ``--pause`` seconds after each of these
changes. The script fails if a step is lost or done twice, and shows what a rank needs, and what driver, rank 0 and
another rank have gained, by samples of each tenth of the rounds, and how long steps took in the first and in the last
tenth. Root only, and it needs iproute2. All ranks share the cores of this machine, so the times are those of a crowd,
not of a cluster.

The memory is the proportional set size: a page that n processes share counts as 1/n of a page for each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import add_json_argument, tabulate
from tests.namespaces import Network, Unavailable

ROOT = Path(__file__).parents[1]
STEP_SECONDS = 0.1
SMALL, LARGE = 4 << 10, 16 << 20
REPEATS = 5
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.02
RATE = "10gbit"
GO_ON, LOOK, END = range(3)


class Worker:
    """A worker of the job, which appends to files of ``folder`` what happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, name: str, **fields: object) -> None:
        """One write, so that a kill leaves no half line."""
        file = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, f"{json.dumps(fields)}\n".encode())
        os.close(file)

    def train(self, state: Any) -> None:
        """Steps until the benchmark wants the end; ``seen`` counts those that all ranks have done together."""
        from hvd_cluster.core import basics

        self.note("worlds", pid=os.getpid(), rank=basics.rank())
        order = GO_ON
        while order != END:
            time.sleep(STEP_SECONDS)
            order = self._step(state)
            if order == LOOK:
                self.note("looks", **{str(size): self._seconds(size) for size in (SMALL, LARGE)})
            state.commit()
        self.note("results", rank=basics.rank(), steps=state.steps, seen=round(float(state.seen), 6))

    def _step(self, state: Any) -> int:
        from hvd_cluster.core import basics

        array = np.full(SMALL // 4, 1 / basics.size(), np.float32)
        array[0] = self._order() if basics.rank() == 0 else 0
        allreduce(array, "step")
        state.steps += 1
        state.seen += float(array[1])
        if basics.rank() == 0:
            round = basics.worlds().round
            self.note("steps", time=time.monotonic(), step=state.steps, size=basics.size(), round=round)
        return int(array[0])

    def _order(self) -> int:
        with suppress(FileNotFoundError):
            path = self.folder / "order"
            order = int(path.read_text())
            path.unlink()
            return order
        return GO_ON

    def _seconds(self, nbytes: int) -> float:
        """The median time of an allreduce of float32 on this rank."""
        array, seconds = np.ones(nbytes // 4, np.float32), []
        for number in range(REPEATS + 1):
            array.fill(1)
            begin = time.monotonic()
            allreduce(array, "look")
            seconds.append(time.monotonic() - begin)
            require(number, array)
        return statistics.median(seconds[1:])


def require(number: int, array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """SystemExit if an element is not the number of ranks."""
    from hvd_cluster.core import basics

    if not (array == basics.size()).all():
        raise SystemExit(f"allreduce {number} is wrong on rank {basics.rank()}")


def allreduce(array: np.ndarray[Any, np.dtype[np.float32]], name: str) -> None:
    """The sum over all ranks, in place."""
    from collectives import Operation
    from hvd_cluster.core.process_sets import global_process_set
    from hvd_cluster.ops.arrays import in_place
    from hvd_cluster.ops.submission import run

    run(Operation.ALLREDUCE, in_place, array, name, global_process_set)


def train(folder: Path) -> None:
    """A worker, from its start to its end."""
    from hvd_cluster.core import basics
    from hvd_cluster.elastic.loop import run
    from hvd_cluster.elastic.state import ObjectState

    worker = Worker(folder)
    basics.init()
    run(worker.train)(ObjectState(steps=0, seen=0.0))


@dataclass(frozen=True)
class Sample:
    """The resources of a process: its descriptors, its threads, and its memory in MB."""

    descriptors: int
    threads: int
    memory: float

    @classmethod
    def of(cls, process: psutil.Process) -> Sample:
        """The present values."""
        return cls(process.num_fds(), process.num_threads(), process.memory_full_info().pss / 1e6)


class Job:
    """An elastic hvdrun with ``ranks`` slots on each host of ``network``. A context manager; its end leaves nothing."""

    def __init__(self, network: Network, ranks: int, folder: Path) -> None:
        self.network, self.ranks, self.folder = network, ranks, folder
        self.names = ["localhost", *list(network.names.values())[1:]]
        self._notes: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._read: dict[str, int] = defaultdict(int)
        self.offer(self.names)

    def __enter__(self) -> Job:
        most = self.ranks * len(self.names)
        options = ["-np", str(most), "--min-np", "1", "--max-np", str(most), "--start-timeout", str(PATIENCE_SECONDS)]
        options += ["--gloo-timeout-seconds", str(int(PATIENCE_SECONDS))]
        hosts = ["--host-discovery-script", f"cat {self.folder}/hosts", "--remote-shell", "ip netns exec {host}"]
        cool = ["--blacklist-cooldown-range", "1", "1"]
        worker = [sys.executable, "-m", "benchmarks.many_ranks", "--worker", str(self.folder)]
        self._log = (self.folder / "log").open("w")
        with self.network.inside("host-0"):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hvd_cluster", *options, *hosts, *cool, *worker],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=self._log,
                stderr=self._log,
            )
        self.begin = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for name in self.network.names:
            self.kill(name)
        self._log.close()

    def offer(self, names: Sequence[str]) -> None:
        """Let the discovery find these hosts."""
        (self.folder / "next").write_text("".join(f"{name}:{self.ranks}\n" for name in names))
        (self.folder / "next").rename(self.folder / "hosts")

    def kill(self, name: str) -> None:
        """All processes of that host at once."""
        found = subprocess.run(["ip", "netns", "pids", self.network.names[name]], capture_output=True, check=True)
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def order(self, order: int) -> None:
        """Rank 0 tells all in its next step."""
        (self.folder / "order.next").write_text(str(order))
        (self.folder / "order.next").rename(self.folder / "order")

    def notes(self, name: str) -> list[dict[str, Any]]:
        """The notes of all workers in the file ``name``, of which each call reads the new ones."""
        path = self.folder / name
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read[name])
                # A reader may see a part of a line that is just written.
                lines, end, _ = file.read().rpartition(b"\n")
            self._notes[name] += map(json.loads, lines.splitlines())
            self._read[name] += len(lines + end)
        return self._notes[name]

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        """The first value of ``ready()`` that is true; SystemExit if it does not come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := ready()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not {what}; hvdrun: {self.process.poll()}\n{self._log_end()}")
            time.sleep(POLL_SECONDS)
        return found

    def until_size(self, size: int, since: float) -> float:
        """Seconds from ``since`` until the end of the first step of a world of ``size`` ranks that began after it."""

        def ready() -> float | None:
            steps = self.notes("steps")
            new = steps[bisect_right(steps, since, key=itemgetter("time")) :]
            last = steps[-len(new) - 1]["round"] if len(new) < len(steps) else None
            found = [note["time"] - since for note in new if note["size"] == size and note["round"] != last]
            return found[0] if found else None

        return float(self.until(ready, f"training among {size} ranks"))

    def workers(self) -> dict[int, psutil.Process]:
        """The process of each rank in the world that it has begun last."""
        return {note["rank"]: psutil.Process(note["pid"]) for note in self.notes("worlds")}

    def _log_end(self) -> str:
        return (self.folder / "log").read_text()[-4000:]


def measure(job: Job, rounds: int, pause: float) -> list[dict[str, object]]:
    """A record for each part of the life of ``job``."""
    most = job.ranks * len(job.names)
    driver = psutil.Process(job.process.pid)
    start = job.until_size(most, job.begin)
    workers = job.workers()
    seconds = sum(sum(worker.cpu_times()[:2]) for worker in (driver, *workers.values()))
    records = [record("start", seconds=start, note=f"{seconds / most:.2f} s of CPU a rank")]
    memory = [Sample.of(worker).memory for worker in workers.values()]
    records.append(record("a rank", memory=statistics.median(memory), note=f"at most {max(memory):.1f} MB"))
    job.order(LOOK)
    look = job.until(lambda: len(found := job.notes("looks")) == most and found, "an allreduce of each size")
    slowest = {size: max(note[str(size)] for note in look) for size in (SMALL, LARGE)}
    records += [record(f"allreduce of {size >> 10} KB", seconds=seconds) for size, seconds in slowest.items()]
    watched = {"driver": driver, "rank 0": workers[0], "another rank": workers[1]}
    records += changes(job, rounds, pause, watched)
    begin = time.monotonic()
    job.order(END)
    status = job.process.wait(PATIENCE_SECONDS)
    records.append(record("shutdown", seconds=time.monotonic() - begin, note=f"hvdrun ended with {status}"))
    check(job, most)
    return records


def changes(job: Job, rounds: int, pause: float, watched: dict[str, psutil.Process]) -> list[dict[str, object]]:
    """The times of lost and planned hosts and of steps, and what the processes ``watched`` have gained."""
    most = job.ranks * len(job.names)
    times: dict[str, list[float]] = {"a host is lost": [], "a host leaves": [], "a host comes": []}
    samples: dict[str, list[Sample]] = {name: [] for name in watched}
    begins = []
    for number in range(rounds):
        begins.append(time.monotonic())
        victim = 1 + number % (len(job.names) - 1)
        job.offer([name for place, name in enumerate(job.names) if place != victim])
        begin = time.monotonic()
        if number % 2 == 0:
            job.kill(f"host-{victim}")
        times["a host leaves" if number % 2 else "a host is lost"].append(job.until_size(most - job.ranks, begin))
        time.sleep(pause)
        begin = time.monotonic()
        job.offer(job.names)
        times["a host comes"].append(job.until_size(most, begin))
        time.sleep(pause)
        if 10 * number // rounds < 10 * (number + 1) // rounds:
            for name, process in watched.items():
                samples[name].append(Sample.of(process))
    found = [record(name, seconds=statistics.median(some), note=f"{len(some)} times") for name, some in times.items()]
    found += steps(job, most, begins)
    return found + [gain(name, each, rounds) for name, each in samples.items()]


def steps(job: Job, most: int, begins: Sequence[float]) -> list[dict[str, object]]:
    """The median step of the whole job in the first and in the last tenth of the rounds, which began at ``begins``."""
    tenth = (len(begins) + 9) // 10
    end = begins[tenth] if tenth < len(begins) else time.monotonic()
    parts = {"first": (begins[0], end), "last": (begins[-tenth], time.monotonic())}
    pairs = [(one, two) for one, two in pairwise(job.notes("steps")) if one["round"] == two["round"]]
    records = []
    for name, (begin, end) in parts.items():
        inside = [(one, two) for one, two in pairs if two["size"] == most and begin <= one["time"] < end]
        if inside:
            seconds = statistics.median(two["time"] - one["time"] for one, two in inside)
            records.append(record(f"a step, {name} tenth", seconds=seconds, note=f"{len(inside)} steps"))
    return records


def gain(name: str, samples: Sequence[Sample], rounds: int) -> dict[str, object]:
    """The record of a process, of which there are ``samples`` of each tenth of the rounds."""
    first, last = samples[0], samples[-1]
    memory = ", ".join(f"{sample.memory:.1f}" for sample in samples)
    note = (
        f"descriptors {first.descriptors} -> {last.descriptors}, threads {first.threads} -> {last.threads}, "
        f"MB {memory} in {rounds} rounds"
    )
    return record(name, memory=last.memory, note=note)


def record(case: str, seconds: float | None = None, memory: float | None = None, note: str = "") -> dict[str, object]:
    """A row of the table."""
    return {"case": case, "seconds": seconds, "MB": memory, "": note}


def check(job: Job, most: int) -> None:
    """SystemExit if a step was lost or done twice, or a rank does not know of it."""
    results = job.notes("results")
    steps = [note["step"] for note in job.notes("steps")]
    if len(results) != most or any(round(note["seen"]) != note["steps"] for note in results):
        raise SystemExit(f"{len(results)} ranks of {most} have ended well: {results[:5]}")
    if sorted(set(steps)) != list(range(1, max(steps) + 1)):
        raise SystemExit(f"steps are missing among {len(steps)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8, help="network namespaces (default: 8)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks on each of them (default: 8)")
    parser.add_argument("--rounds", type=int, default=4, help="hosts that go and come back (default: 4)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of training after each change (default: 0)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker)
        return
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(RATE, arguments.hosts))
        except Unavailable as reason:
            parser.exit(1, f"no hosts in network namespaces: {reason}\n")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd-")))
        records = measure(stack.enter_context(Job(network, arguments.ranks, folder)), arguments.rounds, arguments.pause)
    title = f"{arguments.hosts * arguments.ranks} ranks on {arguments.hosts} hosts"
    tabulate(title, records, arguments, ["allreduce: the slowest rank"])


if __name__ == "__main__":
    main()
