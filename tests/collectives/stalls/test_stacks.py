"""Looks at a thread from another thread."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from collectives.api import Parameters
from collectives.controller.waits import Activity, describe
from collectives.controller.worker import Worker
from collectives.engine.threads import CommandQueue
from collectives.engine.work_table import WorkTable
from collectives.net.channel import InprocHub
from collectives.stalls.stacks import Look, busy, is_idle, is_in_fit, look, read_stacks, region, state_of
from collectives.stalls.status import StatusProbe
from tests.collectives.engine.job import PATIENCE, until

FILE = "tests/collectives/stalls/test_stacks.py"


@contextlib.contextmanager
def running(body):
    """A thread in ``body(end)``, which returns soon after the event ``end``."""
    end = threading.Event()
    thread = threading.Thread(target=body, args=(end,), daemon=True)
    thread.start()
    try:
        until(lambda: any(frame.function == body.__name__ for frame in region(seen(thread.ident), seen(thread.ident))))
        yield thread.ident
    finally:
        end.set()
        thread.join(PATIENCE)


def seen(thread):
    return look(thread, read_stacks())


def looks(thread, seconds=0.05):
    first = look(thread, read_stacks())
    time.sleep(seconds)
    return first, look(thread, read_stacks())


def sleep(end):
    end.wait(PATIENCE)


def spin(end):
    total = 0
    while not end.is_set():
        total += 1
        total -= 1


def test_a_thread_that_waits_uses_no_processor_and_stays_where_it_is():
    with running(sleep) as thread:
        until(lambda: busy(*looks(thread)) < 0.01)
        frames = region(*looks(thread))
    assert frames[-2].function == "sleep"
    assert frames[-2].source == "end.wait(PATIENCE)"
    assert frames[-2].file.endswith(FILE)
    assert frames[-1].file.endswith("threading.py"), "the library in which it waits is named, too"


def test_a_thread_that_computes_is_in_a_loop_of_one_function():
    with running(spin) as thread:
        until(lambda: busy(*looks(thread)) > 0.1)
        found = [region(*looks(thread, 0.01)) for _ in range(5)]
    for frames in found:
        [loop] = [frame for frame in frames if frame.function == "spin"]
        assert loop.first <= loop.last
        assert not [frame for frame in frames if frame.file.startswith(("collectives/", "<frozen"))]


@pytest.mark.parametrize(
    ("used", "queued", "expected"),
    [(0.0, 0.0, 0.0), (0.1, 0.0, 1.0), (0.05, 0.0, 0.5), (0.02, 0.08, 1.0), (0.001, 0.05, 0.02), (0.02, 0.1, 1.0)],
)
def test_the_time_without_a_processor_does_not_count(used, queued, expected):
    assert busy(Look((), 7.0, 3.0, 50.0), Look((), 7.0 + used, 3.0 + queued, 50.1)) == pytest.approx(expected)


def called_by_json(value):
    return looks(threading.get_ident(), 0.0)


def test_users_functions_are_preferred_to_those_of_libraries():
    frames = region(*json.loads('{"a": 1}', object_hook=called_by_json))
    assert [frame.function for frame in frames][-2:] == ["called_by_json", "looks"]
    assert not [frame for frame in frames if "/json/" in frame.file]


def test_an_ended_thread_is_told_apart():
    with running(sleep) as thread:
        assert not seen(thread).has_ended
    until(lambda: seen(thread).has_ended)
    assert busy(seen(thread), seen(thread)) == 0.0
    assert region(seen(thread), seen(thread)) == ()


SCRIPT = """
import sys, threading, time
from collectives.stalls.stacks import look, read_stacks, region

main = threading.main_thread().ident

def wait():
    while not look(main, read_stacks()).has_ended:
        time.sleep(0.001)
    print(region(look(main, read_stacks()), look(main, read_stacks())))

threading.Thread(target=wait).start()
"""


def test_the_main_thread_has_ended_while_the_interpreter_waits_for_others():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "()\n"


def test_the_state_of_a_stopped_process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == (process.pid, "T"))
    finally:
        process.kill()
        process.wait()
    assert state_of(process.pid) is None


@pytest.mark.parametrize("process", [-1, 1 << 30])
def test_no_process_has_no_state(process):
    assert state_of(process) is None


def test_the_name_of_a_process_may_end_inside_a_character():
    """The kernel cuts it to 15 bytes."""
    script = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, 'обучение'.encode()); print(flush=True); time.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert b"\xd0)" in Path(f"/proc/{process.pid}/stat").read_bytes()
        until(lambda: state_of(process.pid) == (process.pid, "S"))
    finally:
        process.kill()
        process.communicate()


def test_a_folder_that_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with running(sleep) as thread:
        assert region(seen(thread), seen(thread))


@pytest.mark.parametrize("broken", ["collectives.stalls.status.look", "threading.Thread.start"])
def test_a_rank_that_cannot_find_out_where_it_stands_says_so(broken, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(broken, fail)
    sent, awake = [], threading.Event()
    works = WorkTable(1, CommandQueue(InprocHub(1).channel(0)))
    probe = StatusProbe(1, works, dict, Worker(Parameters()), sent.append, awake.set)
    probe.locate()
    assert awake.wait(PATIENCE)
    probe.look()
    assert [(found.rank, found.activity) for found in sent] == [(1, Activity.UNKNOWN)]
    assert "rank 1 runs, and could not find out where it stands" in describe(sent[0])
    assert "can't start new thread" in caplog.text


@pytest.mark.parametrize(
    ("file", "function", "is_in"),
    [
        ("/env/site-packages/keras/src/backend/torch/trainer.py", "fit", True),
        ("/env/site-packages/keras/src/backend/torch/trainer.py", "predict", False),
        ("/home/me/keras/train.py", "fit", False),
    ],
)
def test_a_thread_that_is_in_fit_of_keras(file, function, is_in):
    """On whichever thread the question comes: a step of a graph calls collectives on another one."""
    names = {}
    exec(compile(f"def {function}(wait):\n    wait()\n", file, "exec"), names)
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=names[function], args=(lambda: (entered.set(), leave.wait()),))
    thread.start()
    entered.wait()
    try:
        assert is_in_fit() == is_in
    finally:
        leave.set()
        thread.join()
    assert not is_in_fit()


def test_a_thread_is_idle_that_waits_for_another_one():
    with running(sleep) as thread:
        assert is_idle(*looks(thread))
    with running(spin) as thread:
        assert not is_idle(*looks(thread))


@pytest.mark.parametrize("body", ["while not end.is_set(): pass", "end.wait()", "select([wake], [], [])"])
def test_a_thread_of_a_library_is_idle_unless_it_computes(body):
    """Its code is all in files that were installed."""
    names, end = {"select": select.select}, threading.Event()
    exec(compile(f"def installed(end, wake):\n    {body}\n", "/env/site-packages/some.py", "exec"), names)
    with os.fdopen(os.eventfd(0), "w") as wake:
        thread = threading.Thread(target=names["installed"], args=(end, wake), daemon=True)
        thread.start()
        try:
            until(lambda: is_idle(*looks(thread.ident, 0.1)) == (not body.startswith("while")))
        finally:
            end.set()
            os.eventfd_write(wake.fileno(), 1)
            thread.join(PATIENCE)


def test_more_threads_than_can_be_read(caplog):
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(101)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(OSError, match="more threads"):
            read_stacks()
        assert not is_in_fit()
    finally:
        end.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_names_with_other_characters_than_ascii():
    names = {}
    exec(compile("def größe(call):\n    return call()\n", "/tmp/naïve €😀/x.py", "exec"), names)
    places = names["größe"](lambda: look(threading.get_ident(), read_stacks())).places
    assert ("/tmp/naïve €😀/x.py", "größe") in [(place.file, place.function) for place in places]
