"""Elastic jobs on a Ray cluster and on a Spark application, each of which is a process of its own."""

import signal
import sys
from contextlib import suppress

import psutil

from tests.faults.arena import SIGNALS, LocalArena
from tests.faults.events import EXECUTORS, NODES


class ClusterArena(LocalArena):
    """The driver ``program`` makes its cluster, and lets :func:`tests.faults.training.train` run there."""

    program = ""

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

    def hit(self, kind, worker):
        if kind == "drain":
            (self.folder / f"drain-{worker}").touch()
        else:
            super().hit(kind, worker)

    def _processes(self):
        for process in self._family.values():
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    process.info = {"cmdline": process.cmdline()}
                    yield process

    def running(self):
        """Also notes the processes that the driver has started."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._driver.pid).children(recursive=True)
            self._family.update({each.pid: each for each in children})
        return super().running()


class RayArena(ClusterArena):
    """A head without CPUs, and two nodes; half of the ranks are on the second one."""

    repertoire = NODES
    program = "tests.faults.ray_job"

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
        if kind == "heal":
            (self.folder / "restore").touch()
        else:
            super().hit(kind, worker)

    def _strike(self, kind, process):
        (process.parent() if kind == "node" else process).send_signal(SIGNALS.get(kind, signal.SIGKILL))


class SparkArena(ClusterArena):
    """An executor for each rank."""

    repertoire = EXECUTORS
    program = "tests.faults.spark_job"

    def _folders(self):
        paths = {name: str(self.folder / "spark") for name in ("SPARK_WORKER_DIR", "SPARK_LOCAL_DIRS")}
        return {**super()._folders(), **paths, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}

    def _strike(self, kind, process):
        target = {"task": _agent, "executor": _executor}.get(kind, lambda process: process)(process)
        target.send_signal(SIGNALS.get(kind, signal.SIGKILL))


def _agent(worker):
    """The task of Spark, under which a guard runs the worker."""
    return worker.parents()[1]


def _executor(worker):
    return next(each for each in worker.parents() if "--executor-id" in each.cmdline())
