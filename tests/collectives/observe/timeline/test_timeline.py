"""A timeline of running engines."""

import threading

import numpy as np
import pytest

from collectives.api import HorovodInternalError, MismatchError, Operation
from collectives.observe.timeline import recorder as recorder_module
from collectives.observe.timeline import timeline
from collectives.observe.timeline.document import Document, DocumentError
from collectives.observe.timeline.recorder import Recorder
from collectives.observe.timeline.timeline import Timeline
from tests.collectives.engine.job import ones, outcome, run, running, submit, until, wait
from tests.collectives.observe.timeline import trace


class Kept:
    """A sink that keeps the records, or fails."""

    shift, ended, is_ready = 0.0, False, True

    def __init__(self, error=None):
        self.records, self.closed, self._error = [], 0, error

    def write(self, records):
        if self._error is not None:
            raise self._error
        self.records += records

    def close(self):
        self.closed += 1

    def disown(self):
        self.closed += 1


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def recorder_of(engine):
    """One that knows no way to the other ranks."""
    made = Recorder()
    made._engine = engine
    return made


def record(path, body, sets=(), **options):
    """The valid trace of rank 0 of a job of two ranks that run ``body``."""
    with running(2, sets=sets, **options) as job:
        recorder = recorder_of(job.engines[0])
        recorder.start(str(path), True)
        try:
            job.run(body)
        finally:
            recorder.stop()
    records = trace.load(path)
    trace.check(records)
    return records


def test_a_job_as_rank_0_sees_it(path):
    def body(engine):
        works = [submit(engine, ones(engine), name) for name in "ab"]
        for work in works:
            wait(engine, work)
        run(engine, ones(engine), "gathered", Operation.ALLGATHER)
        engine.barrier()
        engine.join()

    records = record(path, body)
    for name in "ab":
        told = trace.story(records, name, phases="BE")
        assert told[0] == "B NEGOTIATE_ALLREDUCE"
        assert told[2:5] == ["B ALLREDUCE", "B QUEUE", "E QUEUE"]
        assert told[5:] == ["B INPROC_ALLREDUCE", "E INPROC_ALLREDUCE", "E ALLREDUCE"]
        assert set(trace.story(records, name, phases="X")) - {"X SUBMITTED"} == {"X 0", "X 1"}
    assert "B ALLGATHER" in trace.story(records, "gathered")
    names = {name.partition(".")[0] for name in trace.rows(records)}
    assert names >= {"a", "b", "gathered", "barrier", "join", "rank 0"}
    assert "CYCLE_START" in {entry.get("name") for entry in records}
    assert [entry["args"]["bytes"] for entry in records if entry["ph"] == "C"][-1] == 0


def test_a_job_in_the_bypass(path, monkeypatch):
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", 1000.0)

    def body(engine):
        for _ in range(8):
            run(engine, np.ones(1 << 18), "x")

    records = record(path, body, shared_memory=True)
    assert trace.story(records, "x").count("B SHM_ALLREDUCE") == 8
    phases = {entry["name"] for entry in records if entry["ph"] == "X" and entry["tid"] >= 100}
    assert phases == {"MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER", "COMBINE", "WAIT_FOR_RANKS"}


def test_refused_tensors_and_process_sets(path):
    def body(engine):
        odd = outcome(lambda: run(engine, np.ones(3 + engine.topology.rank), "odd"))
        assert isinstance(odd, MismatchError)
        if engine.topology.rank == 0:
            run(engine, ones(engine), "alone", process_set=1)
        else:
            run(engine, ones(engine), "other", process_set=2)
        engine.barrier()

    records = record(path, body, sets=[(0,), (1,)])
    assert "i FAILED" in trace.story(records, "odd")
    assert "B ALLREDUCE" in trace.story(records, "alone (process set 1)")
    assert "other (process set 2)" not in trace.rows(records)


def test_a_failure_of_the_backend(path):
    def body(engine):
        return outcome(lambda: run(engine, ones(engine), "x"))

    records = record(path, body, faults={(0, 0): HorovodInternalError("planned")})
    assert "i FAILED" in trace.story(records, "x")


def test_the_file_shows_what_happened_while_the_job_runs(path):
    with running(2) as job:
        recorder = recorder_of(job.engines[0])
        recorder.start(str(path), False)
        try:
            pending = submit(job.engines[0], ones(job.engines[0]), "waits")
            until(lambda: path.read_text().count("NEGOTIATE_ALLREDUCE"))
            trace.check(trace.load(path), complete=False)
            run(job.engines[1], ones(job.engines[1]), "waits")
            wait(job.engines[0], pending)
            until(lambda: path.read_text().count("INPROC_ALLREDUCE") >= 2)
        finally:
            recorder.stop()
    assert not job.engines[0].events.wanted


# The recorder.


def test_a_second_start_with_the_path_does_nothing_and_another_path_takes_over(path, tmp_path):
    other = tmp_path / "other.json"
    with running(1) as job:
        (engine,) = job.engines
        recorder = recorder_of(engine)
        recorder.start(str(path), False)
        run(engine, ones(engine), "first")
        recorder.start(str(path), False)
        recorder.start(str(other), False)
        run(engine, ones(engine), "second")
        recorder.stop()
        recorder.stop()
    assert {"first"} == set(trace.rows(trace.load(path))) - {"rank 0"}
    assert {"second"} == set(trace.rows(trace.load(other))) - {"rank 0"}


def test_a_file_that_cannot_be_written_is_one_line_in_the_log(path, caplog):
    with running(1) as job:
        recorder = recorder_of(job.engines[0])
        recorder.start(str(path / "no" / "t.json"), False)
        assert not recorder.is_recording
        run(job.engines[0], ones(job.engines[0]), "x")
    (line,) = [entry.message for entry in caplog.records]
    assert "cannot be written to" in line
    assert line.endswith("; training goes on without a timeline")


def test_a_new_rank_0_waits_for_the_file_that_a_lost_one_still_holds(path, caplog):
    lost = Document(str(path))
    with running(1) as job:
        recorder = recorder_of(job.engines[0])
        recorder._begin(str(path), False, resumes=True)
        run(job.engines[0], ones(job.engines[0]), "x")
        lost.close()
        until(lambda: recorder._timeline._sink is not None)
        recorder.stop()
    assert "x" in trace.rows(trace.load(path))
    assert not caplog.records


def test_a_file_that_cannot_be_written_is_told_at_once_in_the_next_world_too(path, caplog):
    with running(1) as job:
        recorder = recorder_of(job.engines[0])
        recorder._begin(str(path / "no" / "t.json"), False, resumes=True)
    (line,) = caplog.messages
    assert "cannot be written to" in line


def test_the_other_ranks_do_not_wait_until_a_large_file_is_read(path, monkeypatch):
    """A file of gigabytes takes seconds, in which they would take this rank for a silent one."""
    Document(str(path)).close()
    has_trained = threading.Event()

    def read(self):
        assert has_trained.wait(20.0), "a rank reads the file before it trains"
        return resume(self)

    resume = Document._resume
    monkeypatch.setattr(Document, "_resume", read)
    with running(1) as job:
        recorder = recorder_of(job.engines[0])
        recorder._begin(str(path), False, resumes=True)
        run(job.engines[0], ones(job.engines[0]), "x")
        has_trained.set()
        until(lambda: recorder._timeline._sink is not None)
        recorder.stop()
    assert "x" in trace.rows(trace.load(path))


def test_a_file_that_another_job_writes_is_one_line_in_the_next_world_too(path, caplog, monkeypatch):
    monkeypatch.setattr(recorder_module, "HELD_SECONDS", 0.05)
    other = Document(str(path))
    with running(1) as job:
        recorder = recorder_of(job.engines[0])
        recorder._begin(str(path), False, resumes=True)
        until(lambda: not recorder.is_recording)
        recorder.stop()
    other.close()
    (line,) = caplog.messages
    assert line.startswith("another job writes a timeline to")


# The thread.


@pytest.mark.parametrize(("error", "says"), [(DocumentError("disk full"), "disk full"), (KeyError("bug"), "KeyError")])
def test_a_sink_that_fails_ends_the_recording_and_nothing_else(error, says, caplog):
    with running(1) as job:
        made = Timeline(0, lambda _: Kept(error))
        made.attach(job.engines[0].events)
        run(job.engines[0], ones(job.engines[0]), "x")
        until(lambda: not made.is_recording)
        assert not job.engines[0].events.wanted
        run(job.engines[0], ones(job.engines[0]), "x")
        made.close()
    assert len(caplog.records) == 1
    assert says in caplog.text
    assert "training goes on without" in caplog.text


def test_a_disk_that_is_full_at_the_end_is_a_line_in_the_log_too(caplog):
    sink = Kept()
    made = Timeline(0, lambda _: sink)
    until(lambda: made._sink is sink)
    sink.write = Kept(DocumentError("disk full")).write
    made.close()
    assert caplog.text.count("disk full; training goes on without a timeline") == 1


def test_a_timeline_that_is_closed_while_it_connects_says_nothing(caplog):
    def give_up(is_closing):
        until(is_closing)
        raise DocumentError("given up")

    Timeline(1, give_up).close()
    assert not caplog.records


def test_events_that_come_too_fast_are_counted(monkeypatch, caplog):
    monkeypatch.setattr(timeline, "MOST_EVENTS", 10)
    sink, gate = Kept(), threading.Event()

    def open_slowly(_):
        assert gate.wait(20.0)
        return sink

    with running(1) as job:
        made = Timeline(0, open_slowly)
        made.attach(job.engines[0].events)
        for _ in range(20):
            run(job.engines[0], ones(job.engines[0]), "x")
        gate.set()
        made.close()
    assert [entry.text for entry in sink.records if "EVENTS_DROPPED" in entry.text]
    assert "events come faster" in caplog.text
    assert sink.closed == 1


def test_a_file_that_hangs_does_not_hang_the_job(monkeypatch, caplog):
    monkeypatch.setattr(timeline, "CLOSE_SECONDS", 0.01)
    gate = threading.Event()
    made = Timeline(0, lambda _: (gate.wait(20.0), Kept())[1])
    made.close()
    assert "could not be written within 0.01 s" in caplog.text
    gate.set()
    made._thread.join()


def test_the_last_events_are_written_although_they_are_young(monkeypatch):
    monkeypatch.setattr(timeline, "FLUSH_SECONDS", 100.0)
    sink = Kept()
    with running(1) as job:
        made = Timeline(0, lambda _: sink)
        made.attach(job.engines[0].events)
        run(job.engines[0], ones(job.engines[0]), "x")
        made.close()
    assert [entry for entry in sink.records if '"E"' in entry.text]
