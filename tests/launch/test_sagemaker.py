"""The entry script for SageMaker: it runs with the variables of two hosts, which are two addresses of this one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.launch.launch_files import FILES, ROOT

ENTRY = FILES / "sagemaker" / "entry.py"
HOSTS = ["127.0.0.3", "127.0.0.2"]
SECONDS = 60
SCRIPT = """
import torch
import hvd_cluster.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()
print(f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()} here, sum {total}", flush=True)
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def entry() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sagemaker_entry", ENTRY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(host: str) -> dict[str, str]:
    """What SageMaker's toolkit sets in the container of ``host``."""
    of_hosts = {"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": host, "SM_NETWORK_INTERFACE_NAME": "lo"}
    ours = {"PYTHONPATH": str(ROOT), "RANKS_PER_HOST": "2", "HOROVOD_SECRET_KEY": "of-a-test", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **of_hosts, "SM_NUM_GPUS": "0", **ours}


def test_ranks_of_two_hosts_are_one_job(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(ENTRY), "train.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = [subprocess.Popen(command, cwd=tmp_path, env=environment(host), **pipes) for host in HOSTS]
    told = [run.communicate(timeout=SECONDS)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    # The first host by name has the first ranks.
    for host, ranks in ((1, (0, 1)), (0, (2, 3))):
        for local, rank in enumerate(ranks):
            assert f"rank {rank} of 4, {local} of 2 here, sum 4.0" in told[host], told


def test_the_file_of_the_container_says_the_same_as_the_variables(entry: ModuleType, tmp_path: Path) -> None:
    config = tmp_path / "resourceconfig.json"
    config.write_text(
        json.dumps({"current_host": "algo-2", "hosts": ["algo-2", "algo-1"], "network_interface_name": "eth0"})
    )
    variables = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NETWORK_INTERFACE_NAME": "eth0"}
    assert entry.cluster({}, config) == entry.cluster(variables) == (["algo-1", "algo-2"], "algo-2", "eth0")
    [rank] = entry.variables({}, config)
    assert (rank["RANK"], rank["WORLD_SIZE"], rank["MASTER_ADDR"]) == ("1", "2", "algo-1")
    assert [each["RANK"] for each in entry.variables({**variables, "SM_NUM_GPUS": "4"})] == ["4", "5", "6", "7"]


def test_the_first_failure_ends_the_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nif os.environ['LOCAL_RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(60)\n"
    )
    command = [sys.executable, str(ENTRY), "train.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment(HOSTS[0]), timeout=SECONDS, check=False)
    assert run.returncode == 3


def test_sigterm_reaches_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "pathlib.Path(os.environ['LOCAL_RANK']).touch()\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, str(ENTRY), "train.py"]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment(HOSTS[0]))
    deadline = time.monotonic() + SECONDS
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert run.wait(SECONDS) == 0
