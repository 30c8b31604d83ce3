"""The fixture that looks for resources that a test left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import startup
from tests.conftest import LOOK
from tests.shared_memory import MARK

SEMAPHORE_OF_A_JOB = """
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
input()
"""


def test_a_semaphore_of_this_job_is_found():
    before = LOOK["shared_memory"]()
    lock = multiprocessing.get_context("spawn").Lock()
    assert LOOK["shared_memory"]() - before == {f"sem.{lock._semlock.name.removeprefix('/')}"}


def test_a_semaphore_of_another_job_is_not():
    before = LOOK["shared_memory"]()
    command = [sys.executable, "-c", SEMAPHORE_OF_A_JOB]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        name = job.stdout.readline().strip()
        assert os.path.exists(f"/dev/shm/sem.{name.removeprefix('/')}")
        assert LOOK["shared_memory"]() <= before
        job.communicate("\n", timeout=60)


FILE_OF_A_JOB = """
import mmap, os, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(mmap.PAGESIZE)
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
input()
os.unlink(sys.argv[1])
"""
# The shell ends at once, so that the job is below no process of the tests.
IN_THE_BACKGROUND = ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh"]


@pytest.mark.parametrize(("mark", "is_ours"), [(os.environ[MARK], True), ("of another job", False)])
def test_a_file_is_of_the_job_that_maps_it(mark, is_ours):
    path = Path(f"/dev/shm/test-{os.getpid()}")
    command = [*IN_THE_BACKGROUND, sys.executable, "-c", FILE_OF_A_JOB, path]
    environment = {**os.environ, MARK: mark}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as shell:
        assert shell.stdout.readline() == "mapped\n"
        shell.wait(60)
        found = path.name in LOOK["shared_memory"]()
        shell.communicate("\n", timeout=60)
    assert found is is_ours


def test_processes_below_others_are_found():
    before = LOOK["processes"]()
    context = multiprocessing.get_context("forkserver")
    command = ["sh", "-c", "sleep 60 & wait"]
    forked = context.Process(target=time.sleep, args=(60,))
    forked.start()
    with subprocess.Popen(command, process_group=0) as shell:
        deadline = time.monotonic() + 60
        while len(LOOK["processes"]() - before) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = {each.pid for each in LOOK["processes"]() - before}
        os.killpg(shell.pid, signal.SIGKILL)
    forked.kill()
    forked.join()
    assert len(found) == 3
    assert {forked.pid, shell.pid} <= found


EAGER_AND_COMPILED = """
import sys
import torch

parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.5)
parameter.sum().backward()
optimizer.step()
print(type(sys.modules["torch._dynamo"]).__name__, torch.Generator().initial_seed() > 0)
doubled = torch.compile(lambda values: 2 * values, backend="eager")
print(type(sys.modules["torch._dynamo"]).__name__, doubled(parameter).tolist(), torch._dynamo.config.disable)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
optimizer.step()
print(parameter.tolist())
"""


def test_the_compiler_of_torch_waits_until_something_is_compiled():
    pytest.importorskip("torch")
    variables = {**os.environ, "PYTHONPATH": startup.PATH}
    done = subprocess.run(
        [sys.executable, "-c", EAGER_AND_COMPILED], env=variables, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["Deferred True", "module [1.0, 1.0, 1.0] False", "[0.0, 0.0, 0.0]"]


LIGHTNING = """
import sys
import torch
from lightning.fabric.wrappers import OptimizedModule

def late():
    return [name for name in ("torch._dynamo", "scipy.signal") if type(sys.modules[name]).__name__ == "Deferred"]

network = torch.nn.Linear(2, 2)
print(late(), isinstance(network, OptimizedModule))
import torch._dynamo.config as config
print(late(), config is torch._dynamo.config)
compiled = torch.compile(network, backend="eager")
print(isinstance(network, OptimizedModule), isinstance(compiled, OptimizedModule))
from scipy import signal
print(signal.convolve([1, 2], [3]), late(), hasattr(signal, "hamming"))
"""


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_the_imports_of_lightning_wait_until_somebody_uses_them():
    variables = {**os.environ, "PYTHONPATH": startup.PATH}
    done = subprocess.run([sys.executable, "-c", LIGHTNING], env=variables, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "['torch._dynamo', 'scipy.signal'] False",
        "['scipy.signal'] True",
        "False True",
        "[3 6] [] False",
    ]
