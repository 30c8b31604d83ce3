"""Elastic jobs on a Ray cluster and on a Spark application, each of which is a process of its own."""

import json
import select
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

from tests.faults.arena import LEAVE_SECONDS, SIGNALS, LocalArena, eventually_none
from tests.faults.events import EXECUTORS, NODES


class ClusterArena(LocalArena):
    """The driver ``program`` lets :func:`tests.faults.training.train` run in a cluster."""

    program = ""
    tells_by_exit = False
    fills_disk = False

    def __init__(self, *arguments):
        self._family = {}
        super().__init__(*arguments)

    def _job(self):
        return [self.program, self.most]

    def offer(self, slots):
        """The cluster has as many as the most ranks need."""

    def _process(self, worker):
        """Each worker says its own number, and no other process gets it within a campaign."""
        return psutil.Process(self.chronicle.pids[worker])

    def _processes(self):
        for process in self._family.values():
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    process.info = {"cmdline": process.cmdline()}
                    yield process

    def running(self):
        self._note_family(self._driver)
        return super().running()

    def _note_family(self, started):
        """Note the processes that ``started`` has started."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(started.pid).children(recursive=True)
            self._family.update({each.pid: each for each in children})

    def kill_driver(self, part):
        self._note_family(self._driver)
        super().kill_driver(part)


class RayArena(ClusterArena):
    """A head without CPUs, and two nodes; half of the ranks are on the second one. They live on without the driver."""

    repertoire = NODES
    program = "tests.faults.jobs.ray_job"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._nodes = self._start(["tests.faults.jobs.ray_nodes", self.most, self.folder], **pipes)

    def __exit__(self, *exception):
        try:
            super().__exit__(*exception)
        finally:
            self._end_nodes()

    def _end_nodes(self):
        with suppress(subprocess.TimeoutExpired):
            self._nodes.communicate(timeout=LEAVE_SECONDS)
        self._nodes.kill()
        self._nodes.wait()

    def _folders(self):
        # The name of Ray's folder is a part of the paths of Unix sockets, which have to be short.
        return {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0"}

    def remote(self, workers):
        return tuple(rank for rank, worker in enumerate(workers) if self._raylet(worker) == self._second())

    def _second(self):
        return int((self.folder / "second").read_text())

    def _raylet(self, worker):
        with suppress(psutil.NoSuchProcess):
            return self._process(worker).ppid()

    def hit(self, kind, worker):
        orders = {"drain": "drain", "heal": "restore"}
        if kind in orders:
            self._order(orders[kind])
        else:
            super().hit(kind, worker)

    def _order(self, order):
        self._nodes.stdin.write(f"{order}\n")
        self._nodes.stdin.flush()

    def _strike(self, kind, process):
        (process.parent() if kind == "node" else process).send_signal(SIGNALS.get(kind, signal.SIGKILL))

    def running(self):
        self._note_family(self._nodes)
        return super().running()

    def left(self):
        """First in the cluster, which goes on, and then of it."""
        found = eventually_none(self._used)
        self._end_nodes()
        return found or super().left()

    def _used(self):
        numbers = set(self.chronicle.pids.values())
        workers = [f"worker {each.info}" for each in self._processes() if each.pid in numbers]
        return [*workers, *self._shared_memory(), *self._ask()]

    def _ask(self):
        """The resources that a job uses, as the cluster reports them."""
        self._order("used")
        answers, _, _ = select.select([self._nodes.stdout], [], [], LEAVE_SECONDS)
        answer = self._nodes.stdout.readline() if answers else ""
        return json.loads(answer) if answer else ["a cluster that does not answer"]


class SparkArena(ClusterArena):
    """An executor for each rank."""

    repertoire = EXECUTORS
    program = "tests.faults.jobs.spark_job"

    def __init__(self, *arguments):
        self._leaving = {}
        super().__init__(*arguments)

    def _folders(self):
        paths = {name: str(self.folder / "spark") for name in ("SPARK_WORKER_DIR", "SPARK_LOCAL_DIRS")}
        return {**super()._folders(), **paths, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}

    def hit(self, kind, worker):
        """A cluster manager says that it needs the machine of an executor, and in the end takes it."""
        with suppress(psutil.NoSuchProcess):
            if kind == "drain":
                self._leaving[worker] = _executor(self._process(worker))
                self._leaving[worker].send_signal(signal.SIGPWR)
            elif kind == "heal" and worker in self._leaving:
                self._leaving.pop(worker).kill()
            elif kind != "heal":
                super().hit(kind, worker)

    def _strike(self, kind, process):
        target = {"task": _agent, "executor": _executor}.get(kind, lambda process: process)(process)
        target.send_signal(SIGNALS.get(kind, signal.SIGKILL))

    def kill_driver(self, part):
        """The Python of the driver, or the JVM that it has started; each has to end with the other."""
        super().kill_driver(part) if part == "driver" else self._jvm().kill()

    def _jvm(self):
        self._note_family(self._driver)
        return next(each for each in psutil.Process(self._driver.pid).children() if each.name() == "java")


def _agent(worker):
    """The task of Spark, under which a guard runs the worker."""
    return worker.parents()[1]


def _executor(worker):
    return next(each for each in worker.parents() if "--executor-id" in each.cmdline())
