"""Daemon threads that are in a collective, or between two, when their script ends."""

import subprocess
import sys
import threading

import pytest

from collectives import process_exit
from collectives.process_exit import ProcessExit

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
    from hvd_cluster import basics

    exchange = basics.engine()._exchange
    while hvd.rank() and not (exchange.has_works or exchange.finished):
        pass
"""


@pytest.mark.parametrize("kind", ["loops", "waits"])
def test_a_daemon_thread_does_not_abort_a_script_that_ends(tmp_path, kind):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hvd_cluster.cli", "-np", "2", sys.executable, str(script), kind]
    for _ in range(3):
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr


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
    monkeypatch.setattr(process_exit, "GRACE_SECONDS", 0.01)
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
