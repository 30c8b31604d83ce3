"""The fixture that looks for resources that a test left behind."""

import multiprocessing
import os
import subprocess
import sys

from tests.conftest import LOOK

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
