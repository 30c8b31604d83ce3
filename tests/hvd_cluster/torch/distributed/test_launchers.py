"""The backend "hvd" under launchers, with the variables of torch.distributed and with those of hvdrun."""

import os
import subprocess
import sys

import pytest

from tests import startup

SCRIPT = r"""
import os, sys
import torch
from torch import distributed as dist
import hvd_cluster.torch.distributed

how = {"init_method": sys.argv[1]} if sys.argv[1:] else {}
dist.init_process_group("hvd", **how)
dist.destroy_process_group()
dist.init_process_group("hvd", **how)
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
os.write(1, f"{dist.get_rank()} {dist.get_world_size()} {tensor.item()}\n".encode())
dist.destroy_process_group()
"""
HVDRUN = "hvd_cluster", "-np", "2"
TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"


@pytest.mark.parametrize(("launcher", "arguments"), [(TORCHRUN, ()), (HVDRUN, ("hvd://",))], ids=["torchrun", "hvdrun"])
def test_ranks_of_a_launcher_meet(tmp_path, launcher, arguments):
    (tmp_path / "train.py").write_text(SCRIPT)
    program = [sys.executable] if launcher is HVDRUN else []
    command = [sys.executable, "-m", *launcher, *program, tmp_path / "train.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": startup.PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.rpartition(">:")[2] for line in done.stdout.splitlines())
    assert lines == ["0 2 3.0", "1 2 3.0"]


KILLED = """
import os, signal, sys
import torch
from torch import distributed as dist
import hvd_cluster.torch.distributed

try:
    dist.init_process_group("hvd", init_method="hvd://", world_size=9, rank=0)
except ValueError as error:
    assert "world_size is 9" in str(error) or "rank is 0" in str(error), error
dist.init_process_group("hvd", init_method="hvd://")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which hvdrun ends the other rank, perhaps before it has heard
try:
    dist.barrier()  # rank 0 may be in it still when rank 1 is killed
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
except Exception as error:
    print(error, flush=True)
"""


def test_the_others_hear_of_a_rank_that_was_killed(tmp_path):
    (tmp_path / "train.py").write_text(KILLED)
    command = [sys.executable, "-m", *HVDRUN, sys.executable, tmp_path / "train.py"]
    environment = {**os.environ, "PYTHONPATH": startup.PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 137
    assert "rank 1" in done.stdout, done.stdout + done.stderr
