"""Compute jobs beside the test process, which reads from them as the ranks that train."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from hvd_cluster.data.compute import ComputeService
from hvd_cluster.tensorflow.data.config import TfDataServiceConfig
from tests import startup

ROOT = Path(__file__).parents[4]
KEY = b"k" * 32
SECONDS = 100
WORKER = """
import os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["HOROVOD_RANK"]).write_text(str(os.getpid()))
from hvd_cluster.tensorflow.data import TfDataServiceConfig, compute_worker_fn
compute_worker_fn(TfDataServiceConfig.read(sys.argv[2]))
"""


class Job:
    """The process of ``hvdrun`` with the arguments ``command`` for Python, on ``size`` ranks."""

    def __init__(self, folder, size, *command):
        self._log = folder / "log"
        own = {"PYTHONPATH": startup.PATH, "HOROVOD_GLOO_IFACE": "lo", "TF_CPP_MIN_LOG_LEVEL": "2"}
        hvdrun = [sys.executable, "-m", "hvd_cluster", "-np", str(size), sys.executable, *map(str, command)]
        with self._log.open("w") as log:
            options = {"env": {**os.environ, **own}, "stdout": log, "stderr": subprocess.STDOUT, "cwd": folder}
            self._process = subprocess.Popen(hvdrun, **options)

    def result(self):
        """The exit code and the output."""
        return self._process.wait(SECONDS), self._log.read_text()

    def end(self):
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(SECONDS)


@contextmanager
def running(folder, size, *command):
    job = Job(folder, size, *command)
    try:
        yield job
    finally:
        job.end()


@contextmanager
def serving(folder, workers, side):
    """A service in this process, and ``workers`` ranks that serve: the configuration, and the job."""
    with ComputeService(1, workers, KEY) as service:
        config = TfDataServiceConfig(1, workers, side, service.addresses(), KEY, timeout=SECONDS)
        config.write(folder / "config")
        with running(folder, workers, "-c", WORKER, folder, folder / "config") as job:
            yield config, job


def kill(folder, rank):
    os.kill(int((folder / str(rank)).read_text()), signal.SIGKILL)
