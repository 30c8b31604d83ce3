"""start_timeline, stop_timeline and the variables, as a script uses them."""

import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from collectives.api import NotInitializedError
from hvd_cluster.core import basics
from hvd_cluster.core.basics import start_timeline, stop_timeline
from hvd_cluster.core.observers import Arrival
from tests.collectives.engine.job import run, until
from tests.collectives.observe.timeline import trace


@pytest.fixture(autouse=True)
def alone():
    yield
    basics.shutdown()
    for name in ("collectives", "executors", "hvd_cluster"):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).handlers.clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def step(name="x"):
    run(basics.engine(), np.ones(3), name)


def tensors(path):
    records = trace.load(path)
    trace.check(records)
    return {name for name in trace.rows(records) if name != "job" and not name.startswith("rank ")}


def test_a_script_starts_and_stops_it(path):
    basics.init()
    step("before")
    start_timeline(path)
    step("during")
    stop_timeline()
    step("after")
    assert tensors(path) == {"during"}


def test_shutdown_completes_the_file(path):
    basics.init()
    start_timeline(str(path), mark_cycles=True)
    step()
    basics.shutdown()
    assert tensors(path) == {"x"}
    assert "CYCLE_START" in path.read_text()


def test_the_variable_records_from_init_on(path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    basics.init()
    step()
    stop_timeline()
    assert tensors(path) == {"x"}
    assert "CYCLE_START" not in path.read_text()


def test_the_variable_marks_cycles(path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    basics.init()
    step()
    basics.shutdown()
    assert "CYCLE_START" in path.read_text()


@pytest.mark.parametrize(
    ("course", "steps"),
    [
        ("{0} {1}", ["X PLACEMENT", "X START", "X RENDEZVOUS"]),
        ("{1}", ["X START", "X RENDEZVOUS"]),
        ("", ["X RENDEZVOUS"]),
        ("nonsense", ["X RENDEZVOUS"]),
        ("{2} {2}", ["X RENDEZVOUS"]),
    ],
)
def test_the_way_into_the_first_world(course, steps, path, monkeypatch):
    now = time.time()
    monkeypatch.setenv("HVD_JOB_COURSE", course.format(now - 60.0, now - 20.0, now + 900.0))
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    monkeypatch.setattr(basics._process.observers, "arrival", Arrival())
    basics.init()
    step()
    basics.shutdown()
    records = trace.load(path)
    trace.check(records)
    assert trace.story(records, "job") == steps
    spans = [record for record in records if record["ph"] == "X" and record["pid"] == trace.rows(records)["job"]]
    ends = [round((span["ts"] + span["dur"]) / 1e6) for span in spans]
    if len(steps) == 3:
        assert (round(spans[0]["ts"] / 1e6), ends[0], round(spans[1]["ts"] / 1e6)) == (0, 40, 40)
    path.unlink()
    basics.init()
    basics.shutdown()
    assert "job" not in trace.rows(trace.load(path))


def test_dynamic_records_nothing_by_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    basics.init()
    assert not basics.engine().events.wanted
    assert not list(tmp_path.iterdir())


def test_before_init():
    for call in (lambda: start_timeline("x.json"), stop_timeline):
        with pytest.raises(NotInitializedError):
            call()


@pytest.mark.parametrize("given", [None, 3, "", b"x.json"])
def test_what_is_no_path(given):
    basics.init()
    with pytest.raises(ValueError, match=r"start_timeline\(file_path=.*\) must be the path of a file"):
        start_timeline(given)


def test_a_stop_without_a_start_is_a_warning(caplog):
    basics.init()
    stop_timeline()
    assert [record.message for record in caplog.records] == [
        "stop_timeline() does nothing: no timeline is recorded; start_timeline(path) begins one"
    ]


@pytest.mark.parametrize("by", ["call", "variable"])
def test_a_file_that_cannot_be_written_does_not_stop_the_training(by, caplog, monkeypatch):
    if by == "variable":
        monkeypatch.setenv("HOROVOD_TIMELINE", "/proc/none")
    basics.init()
    if by == "call":
        start_timeline("/proc/none")
    step()
    until(lambda: "training goes on without a timeline" in caplog.text)  # opened later after another world
    assert caplog.text.count("training goes on without a timeline") == 1


SCRIPT = """
import os, sys
import numpy as np
from hvd_cluster.core import basics
from tests.collectives.engine.job import run

basics.init()
run(basics.engine(), np.ones(3), "before")
child = os.fork()
if not child:
    sys.exit(4 if basics.is_initialized() else 0)  # its exit handlers run, too
assert os.waitpid(child, 0)[1] == 0
run(basics.engine(), np.ones(3), "after")
"""


def test_a_process_that_ends_completes_the_file_and_its_children_leave_it_alone(path):
    environment = {**os.environ, "HOROVOD_TIMELINE": str(path)}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert tensors(path) == {"before", "after"}
