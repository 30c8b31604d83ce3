"""Elastic jobs of real processes for tests: ``hvdrun`` with ``training.py``, and what its workers note."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import startup

ROOT = Path(__file__).parents[3]
TRAINING = Path(__file__).with_name("training.py")
HVDRUN = sys.executable, "-m", "hvd_cluster"
PATIENCE_SECONDS = 100.0
POLL_SECONDS = 0.01


class ElasticJob:
    """One ``hvdrun`` that runs the training in ``folder``."""

    def __init__(self, folder, *options, script=TRAINING, arguments=(), variables=()):
        self.folder = folder
        self._files = [(folder / name).open("w") for name in ("out", "err")]
        self.process = subprocess.Popen(
            [*HVDRUN, *map(str, options), sys.executable, str(script), str(folder), *arguments],
            env={**os.environ, "PYTHONPATH": startup.PATH, "OMP_NUM_THREADS": "1", **dict(variables)},
            stdout=self._files[0],
            stderr=self._files[1],
        )

    @property
    def log(self):
        """What hvdrun and its workers wrote to standard error."""
        return (self.folder / "err").read_text()

    @property
    def changes(self):
        """The lines about the changes of the job, without what depends on time."""
        lines = [line.removeprefix("hvdrun: ") for line in self.log.splitlines()]
        return [line.partition(", resumed after")[0] for line in lines if ", resumed after" in line]

    @property
    def workers(self):
        return sorted(path.name for path in self.folder.glob("worker-*"))

    def notes(self, worker):
        path = self.folder / f"worker-{worker}"
        return path.read_text().splitlines() if path.exists() else []

    def pid(self, worker):
        return int(self.notes(worker)[0].removeprefix("pid "))

    def rank(self, worker):
        """The rank in its present world."""
        return int(self._recent(worker)[0].split()[1])

    def results(self):
        """By worker that returned: its steps, the steps that it has seen, its rank, and the size of the world."""
        notes = {worker: self.notes(worker.removeprefix("worker-"))[-1].split() for worker in self.workers}
        return {worker: tuple(map(int, note[1:])) for worker, note in notes.items() if note[0] == "result"}

    def until(self, condition, what):
        """Wait until ``condition()``; fail with what is known if it does not come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            ended = self.process.poll()
            assert ended is None, f"hvdrun ended with {ended} before {what}:\n{self.log}"
            known = {worker: self.notes(worker.removeprefix("worker-"))[-1:] for worker in self.workers}
            assert time.monotonic() < deadline, f"not {what}: {known}\n{self.log}"
            time.sleep(POLL_SECONDS)

    def until_training(self, *workers):
        """Wait until each of ``workers`` has made a step among as many ranks."""
        size = len(workers)
        for worker in workers:
            self.until(
                lambda worker=worker: any(
                    n.startswith("step") and n.endswith(f" {size}") for n in self._recent(worker)
                ),
                f"worker {worker} trained among {size} ranks",
            )

    def _recent(self, worker):
        """The notes of its present world."""
        notes = self.notes(worker)
        begins = [i for i, note in enumerate(notes) if note.startswith("world")]
        return notes[begins[-1] :] if begins else []

    def kill(self, *workers, number=signal.SIGKILL):
        for pid in [self.pid(worker) for worker in workers]:
            os.kill(pid, number)

    def want(self, what, worker):
        """Let ``worker`` do ``what``, see training.py."""
        (self.folder / f".{what}").write_text(f"worker-{worker}")
        (self.folder / f".{what}").rename(self.folder / what)

    def end(self):
        """Let the training end; the exit status of hvdrun."""
        (self.folder / "end").touch()
        return self.wait()

    def wait(self):
        return self.process.wait(PATIENCE_SECONDS)

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_SECONDS)
        for file in self._files:
            file.close()


def assert_agreement(job, *workers):
    """``workers`` returned, all with one result, in which each step was done once; they had the ranks in order."""
    results = job.results()
    assert sorted(results) == sorted(f"worker-{worker}" for worker in workers)
    assert len({result[:2] for result in results.values()}) == 1, results
    steps, seen, _, size = results[f"worker-{workers[0]}"]
    assert steps == seen
    assert size == len(workers)
    assert [results[f"worker-{worker}"][2] for worker in workers] == list(range(size))
