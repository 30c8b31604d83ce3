"""The job of SLURM that puts itself back into the queue runs in bash, with a scontrol that only notes its call.

hvdrun and the ranks are real ones on this host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.launch_files import FILES, ROOT

SECONDS = 60
SCRIPT = FILES / "slurm" / "requeue.sbatch"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user: the environment, the training, and the stub of scontrol."""
    pytest.importorskip("torch")
    (tmp_path / "venv").symlink_to(Path(sys.executable).parents[1])
    shutil.copy(FILES / "train_resume.py", tmp_path)
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "scontrol"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    stub.chmod(0o755)
    return tmp_path


@contextmanager
def start(folder: Path, training: str, restarts: int, ranks: int = 2) -> Iterator[subprocess.Popen[str]]:
    """The batch script as SLURM starts it, with ``training`` in the place of the options of the training."""
    text = SCRIPT.read_text()
    assert '--folder "$folder"' in text
    (folder / "job").write_text(text.replace('--folder "$folder"', f'--folder "$folder" {training}'))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"HOME": str(folder), "PYTHONPATH": str(ROOT), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": str(ranks), "SLURM_CPUS_PER_TASK": "1"}
    if restarts:
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    with (folder / "out").open("a") as out:
        job = subprocess.Popen(["bash", "job"], cwd=folder, env=environment, stdout=out, stderr=out, text=True)
    try:
        yield job
        job.wait(SECONDS)
    finally:
        job.kill()
        job.wait()


def await_text(folder: Path, text: str) -> None:
    deadline = time.monotonic() + SECONDS
    while text not in (folder / "out").read_text():
        assert time.monotonic() < deadline, (folder / "out").read_text()
        time.sleep(0.05)


def test_a_notice_saves_and_requeues_and_the_next_start_goes_on(folder: Path) -> None:
    with start(folder, "--steps 100000 --pause 0.01", restarts=0) as job:
        await_text(folder, "begins with step 0 of")
        time.sleep(0.2)
        job.send_signal(signal.SIGUSR1)
    told = (folder / "out").read_text()
    assert job.returncode == 0, told
    assert (folder / "calls").read_text() == "requeue 7\n"
    saved = int(told.partition("a notice came: step ")[2].partition(" ")[0])
    assert "start 1 has ended before its time" in told

    # One rank is enough to go on: the number of ranks may change between two starts.
    with start(folder, f"--steps {saved + 3}", restarts=1, ranks=1) as job:
        pass
    told = (folder / "out").read_text()
    assert job.returncode == 0, told
    assert f"begins with step {saved + 1} of {saved + 3}" in told
    assert "all steps are done" in told
    assert (folder / "calls").read_text() == "requeue 7\n"  # a training that is done is not started again


def test_a_training_that_fails_is_not_started_again(folder: Path) -> None:
    (folder / "train_resume.py").write_text("raise SystemExit(3)\n")
    with start(folder, "", restarts=0) as job:
        pass
    assert job.returncode == 3, (folder / "out").read_text()
    assert not (folder / "calls").exists()


def test_a_job_starts_only_so_many_times(folder: Path) -> None:
    (folder / "train_resume.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: exit(0))\n"
        "print('it waits', flush=True)\n"
        "time.sleep(60)\n"
    )
    with start(folder, "", restarts=19) as job:
        await_text(folder, "[0]<stdout>:it waits")
        await_text(folder, "[1]<stdout>:it waits")
        job.send_signal(signal.SIGUSR1)
    assert job.returncode == 0, (folder / "out").read_text()
    assert not (folder / "calls").exists()
