"""Where the jobs of a campaign run: an arena starts one, and makes things happen to it."""

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil

from tests.faults.chronicle import Chronicle, Hit, ViolationError
from tests.faults.events import PROCESSES, Ambush, Repertoire
from tests.faults.jobs import traps

ROOT = Path(__file__).parents[2]
TRAINING = "tests.faults.jobs"
DISK_MEGABYTES = 64
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
    """One elastic job. Workers are named by their ids; their notes are in ``chronicle``.

    ``tells_by_exit``: whether a worker ends with success when its process does, and not when its function returns.
    """

    chronicle: Chronicle
    repertoire: Repertoire
    tells_by_exit: bool

    def hit(self, kind: str, worker: str) -> None:
        """Let ``kind``, of the repertoire, happen to ``worker`` or its host; also what ends it, of ENDS.

        One that has ended stays so.
        """

    def lay(self, ambush: Ambush, spared: str) -> None:
        """Lay traps for all but the worker ``spared``."""

    def unlay(self) -> None:
        """Remove the traps that have hit nobody."""

    def release(self, kind: str, hit: Hit) -> None:
        """Let ``kind``, of the values of ENDS, end what a trap has begun."""

    def flap(self) -> None:
        """The discovery gives something else than before, or fails."""

    def remote(self, workers: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that are not on the driver's host."""

    def offer(self, slots: int) -> None:
        """There are ``slots`` slots from now on, and each of them may be used again."""

    def kill_driver(self, part: str) -> None:
        """Kill ``part`` of the driver, of the repertoire."""

    def running(self) -> int | None:
        """The exit status of the driver; None while it runs."""

    def begin_end(self) -> None:
        """Let the training end."""

    def await_end(self) -> int:
        """Wait for the driver; its exit status."""

    def left(self) -> list[str]:
        """What the job has left behind."""


class Disk:
    """A small disk in ``folder``, if this process may make one; else the folder itself."""

    def __init__(self, folder):
        self.folder = folder / "disk"
        self.folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", self.folder]
        self.is_limited = os.geteuid() == 0 and not subprocess.run(command, check=False, capture_output=True).returncode

    def close(self):
        """There is no such disk any more."""
        if self.is_limited:
            subprocess.run(["umount", "--lazy", self.folder], check=True)

    def fill(self):
        """Leave no space on it."""
        with suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))

    def empty(self):
        """Let it have space again."""
        (self.folder / "filler").unlink(missing_ok=True)


class LocalArena:
    """An hvdrun on this host, whose workers train in ``folder``: a context manager."""

    options: tuple[str, ...] = ()
    repertoire = PROCESSES
    tells_by_exit = True
    fills_disk = True

    def __init__(self, folder, ranks, model, samples="sampler", epochs=1 << 20):
        self.folder, self.most = folder, ranks
        self.chronicle = Chronicle(folder)
        self._disk = Disk(folder)
        (self._disk.folder / "tmp").mkdir()
        if self._disk.is_limited and self.fills_disk:
            self.repertoire = replace(self.repertoire, hindrances=(*self.repertoire.hindrances, "fill"))
        (folder / traps.FOLDER).mkdir()
        self._offers, self._whims = 0, itertools.cycle([_nothing, _garbage, _no_host, _one_slot])
        self.offer(ranks)
        self._shm = _shared_memory()
        self._driver = self._start([*self._job(), folder, model, samples, epochs])

    def _start(self, module, **pipes):
        command = map(str, [sys.executable, "-m", *module])
        with (self.folder / "log").open("a") as log:
            environment = {**os.environ, **VARIABLES, **self._folders()}
            return subprocess.Popen([*command], env=environment, **{"stdout": log, "stderr": log, **pipes})

    def _job(self):
        """The disk that may be full has the output of the ranks, a timeline, and temporary files."""
        limits = f"-np {self.most} --min-np 1 --max-np {self.most} --blacklist-cooldown-range 1 1".split()
        discovery = ["--host-discovery-script", f"cat '{self.folder / 'hosts'}'"]
        names = {"--output-filename": "output", "--timeline-filename": "timeline"}
        files = [word for option, name in names.items() for word in (option, self._disk.folder / name)]
        command = ["hvd_cluster", *limits, *discovery, *files, *self.options, sys.executable, "-m", TRAINING]
        return ["tests.faults.jobs.driver", self.folder, *command]

    def _folders(self):
        return {"TMPDIR": str(self._disk.folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}

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
        self._disk.close()

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def remote(self, workers):
        return ()

    def hit(self, kind, worker):
        with suppress(psutil.NoSuchProcess):
            if kind in ("fill", "empty"):
                getattr(self._disk, kind)()
            elif kind in OF_DRIVER:
                self._driver.send_signal(OF_DRIVER[kind])
            else:
                self._strike(kind, self._process(worker))

    def _strike(self, kind, process):
        if kind == "guard":
            self._parent(process).kill()
        elif kind in LIMITS:
            limit, present = LIMITS[kind]
            process.rlimit(limit, (present(process),) * 2)
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

    def flap(self):
        hosts = self.folder / "hosts"
        next(self._whims)(hosts)

    def lay(self, ambush, spared):
        for number in range(ambush.count):
            order = {"kind": ambush.kind, "spared": [spared], "shift": ambush.seconds}
            traps.place(self.folder, ambush.point, number, order)

    def unlay(self):
        traps.remove(self.folder)

    def release(self, kind, hit):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(hit.pid).send_signal(SIGNALS[kind])

    def kill_driver(self, part):
        self._driver.kill()

    def running(self):
        return self._driver.poll()

    def begin_end(self):
        (self.folder / "end").touch()

    def await_end(self):
        try:
            return self._driver.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ViolationError(f"the job did not end within {LEAVE_SECONDS:g} s:\n{self.log[-2000:]}") from None

    def left(self):
        return eventually_none(self._remains)

    def _remains(self):
        driver = ["the driver"] if self._driver.poll() is None else []
        processes = [f"process {each.pid} {each.info['cmdline']}" for each in self._processes()]
        files = [f"file {path}" for path in (self._disk.folder / "tmp").iterdir()]
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
OF_DRIVER = {"halt": signal.SIGSTOP, "resume": signal.SIGCONT}
# A process that has no more than it uses now.
LIMITS = {
    "exhaust": (psutil.RLIMIT_NOFILE, lambda process: process.num_fds()),
    "starve": (psutil.RLIMIT_AS, lambda process: process.memory_info().vms),
}


# The files that an unreliable discovery may print.


def _nothing(hosts):
    hosts.unlink(missing_ok=True)


def _garbage(hosts):
    hosts.write_text("a line that names no host\n")


def _no_host(hosts):
    hosts.write_text("")


def _one_slot(hosts):
    hosts.write_text("localhost:1\n")


def eventually_none(look):
    """What ``look`` finds in the end, if it is not nothing before."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


def _shared_memory():
    """Semaphores of other jobs come and go."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("hvd")}
