"""Where the jobs of a campaign run: an arena starts one, and makes things happen to it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from tests.faults.chronicle import Chronicle, ViolationError
from tests.faults.events import PROCESSES, Repertoire

ROOT = Path(__file__).parents[2]
TRAINING = Path(__file__).with_name("training.py")
# A reaper on Ray waits for 60 s if its owner died before the first call.
LEAVE_SECONDS = 90.0
POLL_SECONDS = 0.01
# A stopped rank is noticed within seconds.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "3",
    "HOROVOD_HEARTBEAT_SECONDS": "2",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
}


class Arena(Protocol):
    """One elastic job. Workers are named by their ids; their notes are in ``chronicle``."""

    chronicle: Chronicle
    repertoire: Repertoire

    def hit(self, kind: str, worker: str) -> None:
        """Let ``kind``, of the repertoire, happen to ``worker`` or its host; also what ends it, of ENDS.

        One that has ended stays so.
        """

    def remote(self, workers: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that are not on the driver's host."""

    def offer(self, slots: int) -> None:
        """There are ``slots`` slots from now on, and each of them may be used again."""

    def kill_driver(self, part: str) -> None:
        """Kill ``part`` of the driver, of the repertoire."""

    def running(self) -> int | None:
        """The exit status of the driver; None while it runs."""

    def left(self) -> list[str]:
        """What the job has left behind."""


class LocalArena:
    """An hvdrun on this host, whose workers train in ``folder``: a context manager."""

    options: tuple[str, ...] = ()
    repertoire = PROCESSES

    def __init__(self, folder, ranks, model, samples="sampler", epochs=1 << 20):
        self.folder, self.most = folder, ranks
        self.chronicle = Chronicle(folder)
        (folder / "tmp").mkdir()
        self._offers = 0
        self.offer(ranks)
        self._shm = _shared_memory()
        self._driver = self._start([*self._job(), folder, model, samples, epochs])

    def _start(self, module, **pipes):
        command = map(str, [sys.executable, "-m", *module])
        with (self.folder / "log").open("a") as log:
            environment = {**os.environ, **VARIABLES, **self._folders()}
            return subprocess.Popen([*command], env=environment, **{"stdout": log, "stderr": log, **pipes})

    def _job(self):
        limits = f"-np {self.most} --min-np 1 --max-np {self.most} --blacklist-cooldown-range 1 1".split()
        discovery = ["--host-discovery-script", f"cat '{self.folder / 'hosts'}'"]
        return ["hvd_cluster", *limits, *discovery, *self.options, sys.executable, TRAINING]

    def _folders(self):
        return {"TMPDIR": str(self.folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._driver.poll() is None:
            self._driver.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._driver.wait(LEAVE_SECONDS)
        self._driver.kill()
        self._driver.wait()
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def remote(self, workers):
        return ()

    def hit(self, kind, worker):
        with suppress(psutil.NoSuchProcess):
            self._strike(kind, self._process(worker))

    def _strike(self, kind, process):
        if kind == "guard":
            self._parent(process).kill()
        elif kind == "exhaust":
            few = process.num_fds()
            process.rlimit(psutil.RLIMIT_NOFILE, (few, few))
        else:
            process.send_signal(SIGNALS[kind])

    def _process(self, worker):
        process = psutil.Process(self.chronicle.pids[worker])
        if str(self.folder) not in process.cmdline():  # another one has its number now
            raise psutil.NoSuchProcess(process.pid)
        return process

    def _parent(self, process):
        parent = process.parent()
        if parent is None or parent.pid == self._driver.pid or str(self.folder) not in parent.cmdline():
            raise psutil.NoSuchProcess(process.pid)
        return parent

    def offer(self, slots):
        # The driver hears of a new number only; more slots than the most ranks are not used.
        self._offers += 1
        (self.folder / "next").write_text(self._hosts(slots, self._offers))
        (self.folder / "next").rename(self.folder / "hosts")

    def _hosts(self, slots, offers):
        # Three numbers, because the driver looks once a second: of two offers in that time it sees the second alone.
        return f"localhost:{slots if slots < self.most else self.most + offers % 3}\n"

    def kill_driver(self, part):
        self._driver.kill()

    def running(self):
        return self._driver.poll()

    def end(self):
        """Let the training end, and wait for the driver; its exit status."""
        (self.folder / "end").touch()
        try:
            return self._driver.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ViolationError(f"the job did not end within {LEAVE_SECONDS:g} s:\n{self.log[-2000:]}") from None

    def left(self):
        return eventually_none(self._remains)

    def _remains(self):
        driver = ["the driver"] if self._driver.poll() is None else []
        processes = [f"process {each.pid} {each.info['cmdline']}" for each in self._processes()]
        files = [f"file {path}" for path in (self.folder / "tmp").iterdir()]
        return [*driver, *processes, *files, *self._shared_memory()]

    def _shared_memory(self):
        return [f"shared memory {name}" for name in sorted(_shared_memory() - self._shm)]

    def _processes(self):
        """The processes of the job: its folder is in their command lines."""
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            if str(self.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield process


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT, "drain": signal.SIGTERM}


def eventually_none(look):
    """What ``look`` finds in the end, if it is not nothing before."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


def _shared_memory():
    """Semaphores of other jobs come and go."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("hvd")}
