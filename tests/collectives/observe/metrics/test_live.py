"""What a rank sends to the live page of its job."""

import json
import logging

import pytest

import hvd_cluster
from collectives.api import CollectiveTimeoutError, InvalidRequestError, PeerLostError
from collectives.events import EventStream, Failed, Finished, Heard, Stalled
from collectives.observe.live import sender as sender_module
from collectives.observe.live.sender import SnapshotSender, period
from collectives.observe.live.snapshot import LAST_RECORDING, Recording, Snapshot, recording_key, snapshot_key
from collectives.observe.live.stalls import KEPT_STALLS, Stalls
from collectives.observe.metrics.meter import Meter, process_meter
from collectives.store.memory import MemoryStore
from hvd_cluster import run
from hvd_cluster.core import basics
from hvd_cluster.core.basics import start_timeline
from tests.collectives.engine.job import until
from tests.live_page import link_file, looker


class Engine:
    """What the sender needs of one."""

    def __init__(self):
        self.events = EventStream()


class Counted(Meter):
    """A meter that has begun."""

    def read(self):
        return hvd_cluster.metrics()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sender_module, "PERIOD_SECONDS", 0.02)
    process_meter._begin()
    process_meter._place = 0, 1, 0
    yield
    process_meter._begin()


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def start(store):
    started = []

    def make(record=lambda path, begins: "", store=store, **more):
        started.append(SnapshotSender(store, "worker-0", "h", Counted(), record, **more))
        return started[-1]

    yield make
    for each in started:
        each.close()


def sent(store):
    return Snapshot.decode(store.get(snapshot_key("worker-0"), 10))


def test_numbers_come_again_and_again(start, store):
    start()
    hvd_cluster.count_samples(3)
    until(lambda: sent(store).samples == 3)
    hvd_cluster.count_samples(4)
    until(lambda: sent(store).samples == 7)


def test_a_closed_sender_sends_no_more(start, store):
    start().close()
    store.delete(snapshot_key("worker-0"))
    with pytest.raises(CollectiveTimeoutError):
        store.get(snapshot_key("worker-0"), 0.1)


def test_stalls_are_shown_once_and_not_for_ever(start, store, monkeypatch):
    engine, sender = Engine(), start(patience=100.0)
    sender.follow(engine)
    now = sender_module.time.monotonic()
    for name, at in (("old", now - 101), ("t", now - 50), ("t", now)):
        engine.events.publish(Stalled(name, 0, (1,), 60.0, at))
    until(lambda: sent(store).stalls)
    (stall,) = sent(store).stalls
    assert (stall.name, stall.missing, stall.seconds) == ("t", (1,), 60.0)
    assert stall.age < 10


def test_stalls_of_the_engine_before_are_over(start, store):
    engine, sender = Engine(), start()
    sender.follow(engine)
    engine.events.publish(Stalled("t", 0, (), 60.0, sender_module.time.monotonic()))
    until(lambda: sent(store).stalls)
    sender.follow(Engine())
    until(lambda: not sent(store).stalls)
    assert engine.events.wanted == frozenset(), "nothing is built for a page that looks elsewhere"


def test_a_tensor_that_is_done_does_not_stall(start, store):
    engine, sender = Engine(), start()
    sender.follow(engine)
    now = sender_module.time.monotonic()
    for process_set in (0, 1):
        engine.events.publish(Stalled("t", process_set, (1, 2), 60.0, now))
    until(lambda: [(each.process_set, each.missing) for each in sent(store).stalls] == [(0, (1, 2)), (1, (1, 2))])
    engine.events.publish(Heard("t", 1, (2,), True, now))
    engine.events.publish(Finished(7, ("s", "t"), 0, now))
    until(lambda: [(each.process_set, each.missing) for each in sent(store).stalls] == [(1, (1,))])
    engine.events.publish(Heard("t", 1, (1,), True, now))
    until(lambda: not sent(store).stalls)
    assert engine.events.wanted == {Stalled}, "nothing more is built while nothing stalls"


def test_a_tensor_that_failed_does_not_stall():
    events = EventStream()
    stalls = Stalls(events, 60.0)
    events.publish(Stalled("t", 0, (), 60.0, 0.0))
    events.publish(Heard("t", 0, (1,), True, 0.0))
    assert [each.name for each in stalls.shown(1.0)] == ["t"], "who is missing is not known here"
    events.publish(Failed(None, "t", 0, ValueError(), 0.0))
    assert stalls.shown(1.0) == []


def test_few_stalls_are_shown():
    events = EventStream()
    stalls = Stalls(events, 60.0)
    for number in range(KEPT_STALLS + 5):
        events.publish(Stalled(f"t{number}", 0, (1,), 60.0, 0.0))
    assert [each.name for each in stalls.shown(1.0)] == [f"t{number}" for number in range(5, KEPT_STALLS + 5)]
    assert stalls.shown(60.0) == []
    assert events.wanted == {Stalled}


def test_requests_to_record_are_carried_out_in_turn(start, store):
    calls = []

    def record(path, begins):
        calls.append((path, begins))
        return f"call {len(calls)}"

    start(record)
    sent(store)
    for number, path in ((1, "one"), (2, "two")):
        store.set(recording_key(number), Recording(number, path, 0.0).encode())
    until(lambda: len(calls) == 4)
    assert calls == [("one", True), ("one", False), ("two", True), ("two", False)]
    until(lambda: sent(store).recording == "call 4")


def test_requests_for_an_earlier_engine_are_not_carried_out_again(start, store):
    """They would replace the files of then."""
    calls = []
    for number in (1, 2):
        store.set(recording_key(number), Recording(number, "old", 0.0).encode())
    store.set(LAST_RECORDING, b"2")
    start(lambda path, begins: calls.append(path) or "")
    sent(store)
    store.set(recording_key(3), Recording(3, "new", 0.0).encode())
    until(lambda: len(calls) == 2)
    assert calls == ["new"] * 2


def test_an_end_that_meets_a_change_of_ranks_is_tried_again(start, store):
    answers = [None, "records", None, None, "recorded"]
    start(lambda path, begins: answers.pop(0))
    sent(store)
    store.set(recording_key(1), Recording(1, "one", 0.0).encode())
    until(lambda: sent(store).recording == "not recorded: the ranks are changing; press again")
    store.set(recording_key(2), Recording(2, "two", 0.0).encode())
    until(lambda: sent(store).recording == "recorded")
    assert not answers


def test_what_is_no_request_does_not_end_the_sender(start, store):
    start()
    sent(store)
    store.set(recording_key(1), b"nonsense")
    before = sent(store).time
    until(lambda: sent(store).time > before + 0.1)


@pytest.fixture
def engine():
    basics.init()
    yield
    basics.shutdown()


def test_a_recording_for_the_page(engine, tmp_path):
    path = str(tmp_path / "t.json")
    assert basics._record_for_page(path, True) == f"records {path}"
    assert basics._record_for_page(path, False) == f"recorded {path}"
    assert json.loads((tmp_path / "t.json").read_text())


def test_a_recording_goes_on_when_the_script_changes_its_directory(engine, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert basics._record_for_page("t.json", True) == f"records {tmp_path / 't.json'}"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert basics._record_for_page("t.json", False) == f"recorded {tmp_path / 't.json'}"


def test_the_page_does_not_end_a_timeline_of_the_script(engine, tmp_path):
    start_timeline(tmp_path / "own.json")
    assert basics._record_for_page("x", True) == "not recorded: the script records a timeline already"
    assert basics._record_for_page("x", False) == "not recorded to the end"
    assert basics._process.observers.recorder.is_recording


def test_a_file_that_cannot_be_written_is_said(engine, tmp_path):
    assert basics._record_for_page(str(tmp_path / "no" / "t.json"), True) == "not recorded: see the log of rank 0"


def test_a_driver_that_is_gone_is_one_line(start, caplog):
    class Gone(MemoryStore):
        turns = 0

        def set(self, key, value, timeout=None):
            self.turns += 1
            raise PeerLostError("the driver is gone")

    gone = Gone()
    with caplog.at_level(logging.INFO, "collectives"):
        start(store=gone)
        until(lambda: gone.turns > 3)
    assert caplog.messages == ["the live page gets no news of this rank: the driver is gone"]


def test_in_a_large_job_each_rank_sends_less_often():
    assert period(64) == sender_module.PERIOD_SECONDS
    assert period(640) == 10 * sender_module.PERIOD_SECONDS


@pytest.mark.parametrize("count", [-1, 1.5, "3", None])
def test_what_is_no_number_of_samples(count):
    with pytest.raises(InvalidRequestError, match="must be an integer of at least 0"):
        hvd_cluster.count_samples(count)


def test_a_job_that_another_one_started_has_no_page_of_its_own(monkeypatch):
    monkeypatch.setenv("HVD_DASHBOARD", "0123456789ab")
    basics.init()
    try:
        assert basics._process.observers._live is None
    finally:
        basics.shutdown()


@pytest.mark.parametrize(("asked", "lines"), [("1", 1), ("0123456789ab", 0), ("", 0)])
def test_a_page_that_no_launcher_serves_is_one_line(monkeypatch, caplog, asked, lines):
    monkeypatch.setenv("HVD_DASHBOARD", asked)
    monkeypatch.setattr(basics._process.observers, "_has_explained", False)
    for _ in range(2):
        basics.init()
        basics.shutdown()
    told = [line for line in caplog.messages if line.startswith("no live page: HVD_DASHBOARD is '1', but only a")]
    assert len(told) == lines


def test_the_page_of_a_job(tmp_path, monkeypatch):
    shown, _ = run(looker(link_file(monkeypatch, tmp_path)), num_proc=2, dashboard=True)
    assert [(rank["rank"], rank["host"]) for rank in shown["ranks"]] == [(0, "localhost"), (1, "localhost")]
    assert shown["size"] == 2
