"""Horovod's names for the data service."""

import importlib
import os
import subprocess
import sys

from hvd_cluster import horovod
from tests import startup
from tests.hvd_cluster.tensorflow.data.jobs import SECONDS

NAMES = {
    "horovod.tensorflow.data": "hvd_cluster.tensorflow.data",
    "horovod.tensorflow.data.compute_service": "hvd_cluster.tensorflow.data.compute_service",
    "horovod.tensorflow.data.compute_worker": "hvd_cluster.tensorflow.data.compute_worker",
    "horovod.runner.common.service.compute_service": "hvd_cluster.data.compute",
}


def test_modules_are_ours(horovod_alias):
    for name, real in NAMES.items():
        assert importlib.import_module(name) is importlib.import_module(real)


def test_the_command_has_its_name():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([horovod.STARTUP, startup.PATH])}
    command = [sys.executable, "-m", "horovod.tensorflow.data.compute_worker", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert "CONFIGFILE [options]" in done.stdout
    assert all(option in done.stdout for option in ("--dispatchers", "--dispatcher-side", "--timeout"))
