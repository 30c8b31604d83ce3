"""A job that trains while strangers send mutated sessions of another job to every port of it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil

from tests.fuzz.attack import MARK, Attack, processes

ROOT = Path(__file__).parents[2]
RECORDER = Path(__file__).parent / "recorder"
TRAINING = Path(__file__).parent / "training.py"
HOSTS = ["127.0.0.2:1\n127.0.0.3:2\n", "127.0.0.2:1\n127.0.0.3:1\n"]
RANKS = 3
PATIENCE_SECONDS = 60.0
LEAVE_SECONDS = 30.0
STEPS_OF_A_WORLD = 300


class Victim:
    """An elastic job on two hosts, which are both this one, with agents, a live page, metrics and a timeline."""

    def __init__(self, folder, steps, records=None):
        self.folder, self.name = folder, uuid.uuid4().hex
        self._read, self._counted = Counter(), 0
        (folder / "steps").mkdir(parents=True)
        self.offer(0)
        path = [str(ROOT)] if records is None else [str(RECORDER), str(ROOT)]
        variables = {
            MARK: self.name,
            "PYTHONPATH": os.pathsep.join(path),
            "HVD_FUZZ_RECORDS": str(records or "/nonexistent"),
            "HVD_CPU_OPERATIONS": "tcp",
        }
        with (folder / "log").open("w") as log:
            self._driver = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hvd_cluster",
                    *self._options(),
                    sys.executable,
                    TRAINING,
                    folder / "steps",
                    str(steps),
                ],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )

    def _options(self):
        return [
            *f"-np {RANKS} --min-np 1 --max-np {RANKS} --blacklist-cooldown-range 1 1".split(),
            *(
                "--host-discovery-script",
                f"cat '{self.folder / 'hosts'}'",
                "--remote-shell",
                "env HVD_FUZZ_HOST={host}",
            ),
            *("--dashboard", "--timeline-filename", str(self.folder / "timeline.json")),
        ]

    def offer(self, number):
        """From now on the job has the hosts HOSTS[number]."""
        (self.folder / "next").write_text(HOSTS[number])
        (self.folder / "next").replace(self.folder / "hosts")

    def steps(self):
        """All records of steps."""
        lines = (line for path in (self.folder / "steps").iterdir() for line in path.read_text().splitlines(True))
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def count(self):
        """The number of these records. Reads only what came since the last call, because there may be a million."""
        for path in (self.folder / "steps").iterdir():
            with path.open("rb") as file:
                file.seek(self._read[path])
                lines, newline, _ = file.read().rpartition(b"\n")
            self._read[path] += len(lines + newline)
            self._counted += (lines + newline).count(b"\n")
        return self._counted

    def wait(self, seconds):
        """The exit code."""
        return self._driver.wait(seconds)

    @property
    def is_running(self):
        return self._driver.poll() is None

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def load(self):
        """The descriptors, the threads and the memory in bytes of each process."""
        found = {}
        for process in processes(self.name):
            with suppress(psutil.Error):
                found[process.pid] = process.num_fds(), process.num_threads(), process.memory_full_info().uss
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.is_running:
            self._driver.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._driver.wait(LEAVE_SECONDS)
        for process in processes(self.name):
            with suppress(psutil.Error):
                process.kill()
        self._driver.wait()


def recorded(folder):
    """The sessions of a short job, which loses and gains ranks."""
    records = folder / "records"
    records.mkdir()
    with Victim(folder / "recorded", 300, records) as job:
        _until(lambda: job.count() > 200, job)
        job.offer(1)
        code = job.wait(PATIENCE_SECONDS)
        if code:
            raise AssertionError(f"the recorded job ended with {code}:\n{job.log}")
    return [path.read_bytes() for path in sorted(records.iterdir())]


def await_steps(job, count):
    """Wait until the ranks have made so many more steps, all together."""
    last = job.count() + count
    _until(lambda: job.count() > last, job)


def _until(condition, job):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline or not job.is_running:
            raise AssertionError(f"the job does not go on:\n{job.log[-2000:]}")
        time.sleep(0.05)  # a look


@contextmanager
def attacked(job, sessions, seed, rate):
    attack = Attack(job.name, sessions, seed, rate)
    attack.start()
    try:
        yield attack
    finally:
        attack.stop()


def run(seed, inputs, rate, changes=True):
    """Attack a job with so many ``inputs``; what became of both."""
    with tempfile.TemporaryDirectory(prefix="hvd-fuzz-") as name:
        folder = Path(name)
        sessions = recorded(folder)
        with Victim(folder / "victim", 1 << 30) as job:
            _until(lambda: job.count() > 300, job)
            quiet, before = [each["seconds"] for each in job.steps()[-200:]], job.load()
            offers = 0
            with attacked(job, sessions, seed, rate) as attack:
                while attack.inputs < inputs and attack.is_alive():
                    await_steps(job, STEPS_OF_A_WORLD)
                    if changes:
                        offers += 1
                        job.offer(offers % 2)
            steps = job.steps()
            after = job.load()
    gains = [[b - a for a, b in zip(before[pid], after[pid], strict=True)] for pid in before.keys() & after.keys()]
    return {
        "sessions": len(sessions),
        "inputs": attack.inputs,
        "megabytes": attack.sent >> 20,
        "addresses": len(attack.doors),
        "changes of the world": offers,
        "steps": len(steps),
        "step in ms before": 1000 * median(quiet),
        "step in ms": 1000 * median(each["seconds"] for each in steps[-200:]),
        "more descriptors": max(gain[0] for gain in gains),
        "more threads": max(gain[1] for gain in gains),
        "more bytes": max(gain[2] for gain in gains),
        "answers": dict(sum_by_word(attack.replies)),
    }


def sum_by_word(replies):
    """The answers of HTTP by their status, all others by their length."""
    found = Counter()
    for (_, word), count in replies.items():
        found[word] += count
    return found
