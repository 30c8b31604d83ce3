"""The parts of run() that need options of their own; the rest is in tests/hvd_cluster/test_run.py."""

import os
import signal
import sys
import threading
import time

import pytest

from collectives.api import PeerLostError
from executors.agents.hosts.job import HostsOptions, run_function
from executors.api import CommandNotFoundError, StartTimeoutError, WorkerError
from executors.failures import Patience
from executors.job.call import Call, pickle_call
from executors.membership import Limits


def wait_for(path):
    """Polls; the timeout of the test bounds it."""
    while not path.exists():
        time.sleep(0.01)


def rank():
    return int(os.environ["HOROVOD_RANK"])


def run(function, *args, size=2, executable=None, **options):
    return run_function(pickle_call(Call.of(function, args)), Limits.static(size), HostsOptions(**options), executable)


def test_a_python_that_does_not_come_up_in_time(tmp_path):
    slow = tmp_path / "slow-python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    with pytest.raises(StartTimeoutError, match=r"did not come up within 0\.1 s: 0, 1; raise the start timeout"):
        run(rank, executable=slow, start_timeout=0.1)


def test_a_python_that_does_not_exist():
    with pytest.raises(CommandNotFoundError, match="there is no command '/no/such/python' that can be executed"):
        run(rank, executable="/no/such/python")


def test_the_cause_is_raised_rather_than_its_consequence(tmp_path, monkeypatch):
    monkeypatch.setattr("executors.driver.driver.PATIENCE", Patience(other=60.0))

    def function():
        if rank() == 0:
            wait_for(tmp_path / "up")
            (tmp_path / "lost").touch()
            raise PeerLostError("rank 1 is lost")
        (tmp_path / "up").touch()
        wait_for(tmp_path / "lost")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="rank 1 on localhost was killed by signal 9"):
        run(function)


@pytest.mark.parametrize("waiting", [True, False])
def test_a_consequence_without_a_cause_is_raised_itself(monkeypatch, waiting):
    def function():
        if waiting and rank() == 1:
            threading.Event().wait(600)
        raise PeerLostError("rank 7 is lost")

    monkeypatch.setattr("executors.driver.driver.PATIENCE", Patience(other=0.1))
    with pytest.raises(PeerLostError, match="rank 7 is lost"):
        run(function)


def test_a_worker_whose_function_returned_but_that_does_not_end_is_ended(monkeypatch):
    def function():
        threading.Thread(target=threading.Event().wait, args=(600,)).start()
        return rank()

    monkeypatch.setattr("executors.agents.local.job.TEARDOWN_SECONDS", 0.1)
    assert run(function) == [0, 1]


def test_a_worker_that_failed_but_does_not_end_is_ended():
    def function():
        threading.Thread(target=threading.Event().wait, args=(600,)).start()
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        run(function, grace=0.1)


def test_the_handlers_of_a_worker_that_failed_run(tmp_path):
    def function():
        import atexit

        if rank() == 0:
            threading.Event().wait(600)
        atexit.register((tmp_path / "handled").touch)
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        run(function)
    assert (tmp_path / "handled").exists()


def test_an_interrupt_in_the_driver_ends_the_workers(monkeypatch):
    def function(driver):
        os.kill(driver, signal.SIGINT)
        threading.Event().wait(600)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(function, os.getpid(), size=1)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_function_has_no_descriptors_of_ours_in_its_children():
    def function():
        import subprocess

        listing = [sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:-1])"]
        return subprocess.run(listing, stdout=subprocess.PIPE, close_fds=False, text=True, check=True).stdout

    assert run(function, size=1) == ["['0', '1', '2']\n"]
