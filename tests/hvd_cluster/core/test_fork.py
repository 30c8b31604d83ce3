"""A forked child of a process whose engine runs, such as a worker of a DataLoader."""

import subprocess
import sys

import pytest

from hvd_cluster.core import basics

PATIENCE = 60

SCRIPT = """
import os, sys, threading, time, warnings
from hvd_cluster.core import basics

warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, about a fork beside threads
basics.init()
engine = basics.engine()
lock = eval(sys.argv[1])
held, done = threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        done.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if not child:
    os._exit(3 if basics.is_initialized() else 0)
deadline = time.monotonic() + 20
while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
    time.sleep(0.001)
if not ended[0]:
    os.kill(child, 9)
    os.waitpid(child, 0)
done.set()
holder.join()
basics.shutdown()
sys.exit(0 if ended[0] and os.waitstatus_to_exitcode(ended[1]) == 0 else 1)
"""

LOCKS = {
    "works": "engine._works._lock",
    "callers": "engine._parts.waiters.changed",
    "parking": "engine._queue.unpark._changed",
    "start and end": "basics._process.lock",
}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_child_takes_no_lock_that_another_thread_held_at_the_fork(lock):
    command = [sys.executable, "-c", SCRIPT, LOCKS[lock]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr


def test_a_child_closes_its_copy_of_an_engine_that_is_still_ending(monkeypatch):
    """Such an engine was shut down in a signal handler, which could not wait for it."""

    class Ending:
        disowned = False

        def disown(self):
            self.disowned = True

    engine, process = Ending(), basics._Process()
    process.ending.append(engine)
    monkeypatch.setattr(basics, "_process", process)
    basics._forget()
    assert engine.disowned
    assert process.ending == []
