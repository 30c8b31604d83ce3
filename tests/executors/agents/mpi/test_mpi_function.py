"""A function by mpirun: a script in its place here; test_environments.py has real ones."""

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from collectives.settings import ENVIRONMENT_SECRET
from executors.agents.hosts import messages
from executors.agents.hosts.agent import AgentLink
from executors.agents.local.supervisor import WorkerStarted
from executors.agents.mpi import function
from executors.agents.mpi.function import MpiOptions, run_function_by_mpi
from executors.agents.mpi.mpirun import MpiJob
from executors.api import CommandNotFoundError, ExecutorError, RemoteError, StartTimeoutError, WorkerError
from executors.job.call import Call, pickle_call
from executors.job.job import secret_of

SIZE = 2
RANKS = f"""
printf '%s\\n' "$@" > "$0.words"
while [ "$1" != {sys.executable} ]; do shift; done
for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE={SIZE} "$@" & done
wait
"""


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    """Puts a program first on PATH; by default it starts two ranks, and waits for both, however they end."""
    monkeypatch.setattr(function, "CAUSE_SECONDS", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def put(script=RANKS):
        path = tmp_path / "mpirun"
        path.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; exit; fi\n{script}\n'
        )
        path.chmod(0o755)
        return path

    put()
    return put


def results(body, size=SIZE, **options):
    return run_function_by_mpi(pickle_call(Call.of(body)), MpiJob((), {"localhost": size}), MpiOptions(**options))


def rank():
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def test_the_results_by_rank_and_the_secret_on_no_command_line(mpirun):
    said = mpirun().with_name("mpirun.words")

    def body():
        return rank(), os.environ["HVD_TEST"], ENVIRONMENT_SECRET in os.environ, psutil.Process().environ()

    (*first, environment), (*second, _) = results(body, variables={"HVD_TEST": "x"})
    assert (first, second) == ([0, "x", False], [1, "x", False])
    words = said.read_text().splitlines()
    assert ENVIRONMENT_SECRET in words
    assert not [word for word in words if environment[ENVIRONMENT_SECRET] in word]


@pytest.mark.usefixtures("mpirun")
def test_an_exception_comes_back_as_itself_and_ends_the_others():
    def body():
        if rank() == 1:
            raise KeyError("no such column")
        threading.Event().wait(600)

    with pytest.raises(KeyError, match="no such column") as caught:
        results(body)
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.rank == 1


@pytest.mark.usefixtures("mpirun")
@pytest.mark.parametrize("end", [lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_rank_that_ends_is_named_and_the_others_are_ended(end):
    def body():
        if rank() == 1:
            end()
        threading.Event().wait(600)

    with pytest.raises(WorkerError, match=r"rank 1 on .* ended before its function returned") as caught:
        results(body)
    assert caught.value.rank == 1


def test_an_mpirun_that_fails_is_shown_with_its_last_lines(mpirun):
    mpirun("echo there are not enough slots >&2; exit 7")
    with pytest.raises(ExecutorError, match=r"mpirun ended with exit code 7 before its ranks were up\. The last lines"):
        results(rank)


def test_ranks_that_do_not_come_up_in_time_are_named(mpirun):
    mpirun(RANKS.replace("0 1", "0"))
    text = r"of 2 ranks on localhost, mpirun did not bring up these within 0\.5 s: (0, )?1; raise the start timeout"
    with pytest.raises(StartTimeoutError, match=text):
        results(lambda: threading.Event().wait(600), start_timeout=0.5)


def test_an_mpirun_that_does_not_say_the_rank_is_refused(mpirun):
    mpirun(RANKS.replace("OMPI_COMM_WORLD_SIZE", "SIZE"))
    with pytest.raises(ExecutorError, match="mpirun was to start 2 ranks, but its variables here say 1; use another"):
        results(rank)


@pytest.mark.usefixtures("mpirun")
def test_a_rank_with_other_versions_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "PYTHON", "2.7")
    with pytest.raises(ExecutorError, match=r"on .* cannot be used: it has hvd-cluster .* driver .* on Python 2\.7"):
        results(rank)


def test_a_python_that_is_not_there(mpirun):
    with pytest.raises(CommandNotFoundError, match="there is no command '/nope/python'"):
        results(rank, python="/nope/python")


def test_a_rank_that_outlives_mpirun_is_not_waited_for(mpirun, monkeypatch):
    """The rank is a thread here, which no mpirun ends."""
    monkeypatch.setattr(function, "GRACE_SECONDS", 0.1)
    path = mpirun(f'echo "${ENVIRONMENT_SECRET}" "$@" > "$0.said"; until [ -e "$0.up" ]; do sleep 0.02; done')

    def outlive():
        while not said.exists() or not said.read_text().endswith("\n"):
            time.sleep(0.02)
        words = said.read_text().split()
        with socket.create_connection((words[-3], int(words[-2]))) as sock:
            link = AgentLink(sock, secret_of({ENVIRONMENT_SECRET: words[0]}), "far")
            link.send(WorkerStarted(1, 1))
            link.first()
            path.with_name("mpirun.up").touch()
            return sock.recv(1)

    said = path.with_name("mpirun.said")
    with ThreadPoolExecutor(1) as pool:
        rank_1 = pool.submit(outlive)
        with pytest.raises(WorkerError, match="rank 1 on far ended before its function returned; mpirun ended with"):
            results(rank)
        with suppress(ConnectionResetError):
            assert rank_1.result(60) == b""
