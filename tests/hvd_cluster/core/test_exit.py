"""Daemon threads that are in a collective, or between two, when their script ends."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from collectives.engine import shutdown
from collectives.engine.shutdown import ProcessExit
from executors.job.job import Job
from executors.job.worlds import assign_ranks
from tests.namespaces import HOSTS
from tests.networks import network_or_skip
from tests.startup.sitecustomize import WHOLE_END


@pytest.fixture(autouse=True)
def ends_as_for_users(monkeypatch):
    monkeypatch.setenv(WHOLE_END, "1")


SCRIPT = """
import sys, threading
import torch
import hvd_cluster.torch as hvd

hvd.init()
running = threading.Event()


def repeat():
    tensor = torch.ones(100_000)
    while True:
        try:
            for step in range(20):
                hvd.allreduce(tensor, name="x")
            running.set()
        except Exception:
            pass


def wait():
    hvd.allreduce(torch.ones(16), name="y")
    running.set()
    hvd.allreduce(torch.ones(3_000_000), name="alone")


def accompany():
    hvd.allreduce(torch.ones(16), name="y")
    running.set()


kind = {"loops": repeat, "waits": wait if hvd.rank() else accompany}[sys.argv[1]]
threading.Thread(target=kind, daemon=True).start()
running.wait()
if sys.argv[1] == "waits":
    from hvd_cluster.core import basics

    engine = basics.engine()
    while hvd.rank() and not (engine._loop.has_works or engine._ends.ending.finished):
        pass
"""


@pytest.mark.parametrize("kind", ["loops", "waits"])
def test_a_daemon_thread_does_not_abort_a_script_that_ends(tmp_path, kind):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hvd_cluster.cli.hvdrun", "-np", "2", sys.executable, str(script), kind]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


IN_FLIGHT = """
import pathlib, sys
import numpy
from collectives.api import Operation
from hvd_cluster.core import basics
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.objects import global_process_set
from hvd_cluster.ops.submission import run, start

basics.init()
run(Operation.ALLREDUCE, in_place, numpy.ones(16, "f"), "first", global_process_set)
handle = start(Operation.ALLREDUCE, in_place, numpy.ones(4_000_000, "f"), "large", global_process_set)
submitted = pathlib.Path(sys.argv[1])
(submitted / str(basics.rank())).touch()
while len(list(submitted.iterdir())) < basics.size():
    pass
"""


def test_a_script_on_two_hosts_ends_while_a_large_allreduce_is_in_flight(tmp_path):
    """It is a pipeline of stages, whose threads must outlive the interpreter's own end of thread pools."""
    script = tmp_path / "train.py"
    script.write_text(IN_FLIGHT)
    with network_or_skip() as network:
        for attempt in range(2):
            submitted = tmp_path / f"submitted-{attempt}"
            submitted.mkdir()
            for code, output in run_on_hosts(network, [str(script), str(submitted)]):
                assert (code, "Traceback" in output) == (0, False), output


def run_on_hosts(network, arguments):
    """Exit code and errors of a script, given by the ``arguments`` of Python, for two ranks of each host."""
    hosts = [host for host in HOSTS for _ in range(2)]
    with contextlib.ExitStack() as stack:
        with network.inside(HOSTS[0]):
            job = stack.enter_context(Job(len(hosts), network.address))
        processes = []
        for slot in assign_ranks(hosts):
            environment = {**os.environ, **job.environment(slot), "OMP_NUM_THREADS": "1"}
            with network.inside(slot.host):
                process = subprocess.Popen([sys.executable, *arguments], env=environment, stderr=subprocess.PIPE)
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=60)[1].decode() for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


CYCLE = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
from hvd_cluster.core import basics


class Log:
    def __init__(self):
        self.file = open("log", "w")
        self.file.write("the last line")
        self.own = self


log = Log()
closed = open("closed", "w")
closed.close()
"""


def test_the_end_frees_no_objects_but_writes_files(tmp_path):
    """Also a file that only the garbage collector would close."""
    command = [sys.executable, "-W", "ignore", "-c", CYCLE]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert (result.stdout, result.stderr) == ("True\n", "")
    assert (tmp_path / "log").read_text() == "the last line"


FULL_PIPE = """
import os, select, threading
from hvd_cluster.core import basics

log = open("log", "w")  # the end looks at writers only where a file is open
read, write = os.pipe()
file = open(write, "wb")
waits = threading.Event()


def fill():
    waits.set()
    file.write(bytes(1 << 20))


threading.Thread(target=fill, daemon=True).start()
waits.wait()
while select.select([], [write], [], 0)[1]:
    pass
"""


def test_a_daemon_thread_at_a_full_pipe_does_not_hold_the_end(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", FULL_PIPE]
    subprocess.run(command, cwd=tmp_path, timeout=60, check=True)


@pytest.mark.parametrize(("daemon", "ending", "held"), [(True, True, True), (False, True, False), (True, False, False)])
def test_only_daemon_threads_of_a_process_that_ends_are_held(daemon, ending, held):
    exit, order = ProcessExit(), []
    if ending:
        exit.begin()
    exit.hold()  # this thread runs the exit handlers
    thread = threading.Thread(target=lambda: (exit.hold(), order.append("thread")), daemon=daemon)
    thread.start()
    if held:
        exit.settle([thread.ident])
        order.append("end")
        exit._never.set()
    thread.join()
    assert order == (["end", "thread"] if held else ["thread"])


def test_the_end_does_not_wait_for_threads_that_are_no_daemons_or_do_not_come(monkeypatch):
    monkeypatch.setattr(shutdown, "EXIT_SECONDS", 0.01)
    exit, over = ProcessExit(), threading.Event()
    exit.begin()
    threads = [threading.Thread(target=over.wait, daemon=daemon) for daemon in (True, False)]
    for thread in threads:
        thread.start()
    exit.settle([thread.ident for thread in threads] + [threading.get_ident()])
    assert not exit._held
    over.set()
    for thread in threads:
        thread.join()
