"""The records of all ranks in the file of rank 0."""

import logging
import secrets
import threading
import time
from types import SimpleNamespace

import pytest

from collectives.api import PeerLostError, Timeouts, Topology, World
from collectives.engine import start
from collectives.handshake import dial
from collectives.observe.timeline import gathering, sending
from collectives.observe.timeline.address import TimelineAddress
from collectives.observe.timeline.document import Document, DocumentError
from collectives.observe.timeline.gathering import Gathering
from collectives.observe.timeline.recorder import Recorder
from collectives.observe.timeline.records import Moment, Record, rank_row, tensor_row, text
from collectives.observe.timeline.sending import Sender
from collectives.observe.timeline.timeline import Timeline
from collectives.settings import Settings
from collectives.store.server import RendezvousServer
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, ones, run, until
from tests.collectives.observe.timeline import trace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


@pytest.fixture
def launcher():
    """``launcher(rank, size, **changes)``: the world and the settings of a rank of one job."""
    secret = secrets.token_bytes(16)

    def launch(rank, size, host="node", round=0, **changes):
        world = World("test", round, Topology(rank, size, rank, size, hosts=(), cores=0), host, ("127.0.0.1", port))
        timeouts = Timeouts(connect=PATIENCE, collective=PATIENCE)
        return world, Settings(**({"secret": secret, "timeouts": timeouts} | changes))

    with RendezvousServer(secret) as server:
        port = server.port
        yield launch


@pytest.fixture
def rendezvous(launcher):
    return lambda rank, **changes: TimelineAddress(*launcher(rank, 3, **changes), "127.0.0.1")


@pytest.fixture
def gathered(path, rendezvous):
    made = Gathering(Document(str(path)), rendezvous(0))
    yield made
    made.close()


@pytest.fixture(params=["node", "another host"])
def sender(request, rendezvous, gathered):
    made = Sender(rendezvous(1, host=request.param), lambda: False)
    yield made
    made.close()


def record(number, rank=1):
    return Record(rank_row(rank), text("i", 0, Moment.at(number), f',"name":"{number}","s":"t"'))


def names(path):
    return [entry["name"] for entry in trace.load(path) if entry["ph"] == "i"]


def test_a_job_of_three_ranks_has_three_lanes(launcher, path):
    def body(rank):
        world, settings = launcher(rank, 3, timeline=str(path), timeline_mark_cycles=True)
        engine, recorder = start.connect(world, settings), Recorder()
        recorder.follow(engine, world, settings)
        for _ in range(4):
            run(engine, ones(engine), "x")
        if rank == 0:
            until(lambda: all(f'"rank {other}"' in path.read_text() for other in range(3)))
        engine.barrier()
        engine.shutdown()
        recorder.leave()

    in_threads(3, body, PATIENCE)
    records = trace.load(path)
    trace.check(records)
    activities = [trace.story(records, "x", rank, "B") for rank in range(3)]
    assert activities[0] == activities[1] == activities[2]
    assert len(activities[0]) == 16
    assert {f"rank {rank}" for rank in range(3)} <= set(trace.rows(records))
    lanes = {entry["pid"] for entry in records if entry.get("name") == "CYCLE_START"}
    assert lanes == {trace.rows(records)["rank 0"]}


@pytest.mark.parametrize("by", ["variable", "call", "relative path"])
def test_a_timeline_goes_on_in_the_next_world(by, launcher, path, tmp_path, monkeypatch):
    """Rank 2 has left; rank 0 and 1 go on."""
    monkeypatch.chdir(path.parent)
    given = path.name if by == "relative path" else str(path)
    (tmp_path / "elsewhere").mkdir()

    def body(rank):
        recorder = Recorder()
        for round, size in ((0, 3), (1, 2)):
            expected = 3 if round == 0 else 5
            if rank < size:
                world, settings = launcher(rank, size, round=round, timeline="" if by == "call" else given)
                engine = start.connect(world, settings)
                recorder.follow(engine, world, settings, "rank 2 left", worker=f"worker-{rank + 4}")
                if (by, round) == ("call", 0):
                    recorder.start(given, False)
                run(engine, ones(engine), "x")
                if rank == 0:
                    until(lambda expected=expected: path.read_text().count('SHM_ALLREDUCE","args"') >= expected)
                engine.barrier()
                engine.shutdown()
                recorder.leave(goes_on=True)
                if rank == 0:
                    monkeypatch.chdir(tmp_path / "elsewhere")

    in_threads(3, body, PATIENCE)
    records = trace.load(path)
    trace.check(records)
    (moment,) = [entry for entry in records if entry.get("name") == "WORLD"]
    assert moment["args"] == {"round": 1, "size": 2, "change": "rank 2 left"}
    pauses = [entry for entry in records if entry.get("name") == "WORLD_CHANGE"]
    assert {entry["pid"] for entry in pauses} == {trace.rows(records)[f"rank {rank}"] for rank in range(2)}
    assert {entry["args"]["worker"] for entry in pauses} == {"worker-4", "worker-5"}, "as in the log"
    assert all(entry["ts"] + entry["dur"] <= moment["ts"] + 1e6 for entry in pauses)
    assert [trace.story(records, "x", rank, "B").count("B ALLREDUCE") for rank in range(3)] == [2, 2, 1]


def test_the_batches_of_all_ranks_overlap_in_time(launcher, path):
    """A barrier ends on no rank before it has begun on all."""

    def body(rank):
        world, settings = launcher(rank, 2, timeline=str(path))
        engine, recorder = start.connect(world, settings), Recorder()
        recorder.follow(engine, world, settings)
        engine.barrier()
        if rank == 0:
            until(lambda: '"rank 1"' in path.read_text())
        engine.barrier()
        engine.shutdown()
        recorder.leave()

    in_threads(2, body, PATIENCE)
    records = trace.load(path)
    for name in ("barrier.noname.0", "barrier.noname.1"):
        spans = [
            [entry["ts"] for entry in records if entry["pid"] == trace.rows(records)[name] and entry.get("tid") == rank]
            for rank in range(2)
        ]
        assert max(span[1] for span in spans) <= min(span[-1] for span in spans)


def test_records_arrive_in_their_order(path, gathered, sender):
    sent = [record(number) for number in range(2000)]
    for first in range(0, 2000, 100):
        sender.write(sent[first : first + 100])
    until(lambda: len(gathered._waiting.records) == 2000)
    gathered.write([Record(tensor_row("x", 0), text("i", 0, Moment.at(1.0), ',"name":"own","s":"t"'))])
    assert names(path) == ["own", *map(str, range(2000))]


def test_processes_of_one_host_have_the_same_time(gathered, sender):
    assert sender.shift == gathered.shift == -gathered._origin


@pytest.mark.parametrize("ahead", [1000.0, -50.0])
def test_the_clock_of_another_host_is_corrected(ahead, gathered, rendezvous, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(sending, "time", clock)
    made = Sender(rendezvous(1), lambda: False)
    here = clock.monotonic() + made.shift
    assert here == pytest.approx(time.monotonic() + gathered.shift, abs=sending.TRIP_SECONDS)
    made.close()


def test_the_clock_is_estimated_again(gathered, sender, monkeypatch):
    monkeypatch.setattr(sending, "CLOCK_SECONDS", 0.0)
    sender.shift = 7.0
    sender.write([])
    assert sender.shift == gathered.shift


def test_the_last_records_of_a_rank_arrive_although_rank_0_ends(path, gathered, sender):
    sender.write([record(1)])
    sender.close()
    gathered.close()
    assert names(path) == ["1"]


def test_rank_0_ends_the_recording_of_the_others(gathered, sender, monkeypatch):
    monkeypatch.setattr(gathering, "CLOSE_SECONDS", 0.05)
    gathered._receiver.close()
    until(lambda: (sender.write([]), sender.ended)[1])


def test_a_rank_that_is_lost_takes_nothing_along(path, gathered, sender, rendezvous):
    sender.disown()
    other = Sender(rendezvous(2), lambda: False)
    other.write([record(2, 2)])
    other.close()
    until(lambda: gathered._waiting.records)
    gathered.write([])
    assert names(path) == ["2"]


def test_nonsense_ends_one_connection_only(path, gathered, sender, rendezvous, caplog):
    sender._connection.send(b"r\xff\xff")
    until(lambda: (sender.write([]), sender.ended)[1])
    assert "the timeline lacks a rank" in caplog.text
    other = Sender(rendezvous(2), lambda: False)
    other.close()


def test_while_rank_0_cannot_write_the_others_wait_and_nothing_grows(path, gathered, sender, monkeypatch):
    monkeypatch.setattr(gathering, "MOST_WAITING", 500_000)
    many = [Record(rank_row(1), text("i", 0, Moment.at(1.0), f',"name":"{"x" * 5000}","s":"t"'))] * 200
    writes = 0
    while sender.is_ready and writes < 100:
        sender.write(many)
        writes += 1
    assert writes < 100
    monkeypatch.setattr(gathering, "MOST_WAITING", 10**9)
    until(lambda: (sender.is_ready, len(gathered._waiting.records))[1] == writes * 200)


def test_a_process_without_the_secret_is_refused(gathered, rendezvous, monkeypatch, caplog):
    """Even if it knows where rank 0 is."""
    known, stranger = rendezvous(1), rendezvous(1, secret=b"x" * 16)
    monkeypatch.setattr(TimelineAddress, "store", lambda self, store=TimelineAddress.store: store(known))
    with pytest.raises(DocumentError, match=r"rank 1 cannot send its timeline to rank 0: .*secret"):
        Sender(stranger, lambda: False)


@pytest.fixture
def in_vain(monkeypatch):
    """Set as soon as a rank has called an address of rank 0 in vain."""
    called = threading.Event()

    def attempt(*args, attempt=dial._try):
        try:
            return attempt(*args)
        except PeerLostError:
            called.set()
            raise

    monkeypatch.setattr(dial, "_try", attempt)
    return called


def test_a_rank_finds_the_next_recording_although_it_knows_the_address_of_the_last(path, rendezvous, in_vain):
    Gathering(Document(str(path)), rendezvous(0)).close()

    def restart():
        assert in_vain.wait(PATIENCE)
        return Gathering(Document(str(path)), rendezvous(0))

    second, made = in_threads(
        2, lambda role: restart() if role == 0 else Sender(rendezvous(1), lambda: False), PATIENCE
    )
    made.write([record(1)])
    made.close()
    second.close()
    assert names(path) == ["1"]


def test_a_rank_that_begins_the_next_recording_first_waits_for_rank_0(path, gathered, sender, rendezvous, in_vain):
    sender.close()

    def restart():
        assert in_vain.wait(PATIENCE)
        gathered.close()
        return Gathering(Document(str(path.with_suffix(".next"))), rendezvous(0))

    second, made = in_threads(
        2, lambda role: restart() if role == 0 else Sender(rendezvous(1), lambda: False), PATIENCE
    )
    made.write([record(1)])
    made.close()
    second.close()
    assert (names(path), names(path.with_suffix(".next"))) == ([], ["1"])


def test_a_disk_that_is_full_is_one_line(path, rendezvous, monkeypatch, caplog):
    def fail(self, records):
        raise DocumentError("disk full")

    monkeypatch.setattr(Document, "write", fail)
    made = Timeline(0, lambda _: Gathering(Document(str(path)), rendezvous(0)))
    until(lambda: not made.is_recording)
    made.close()
    assert caplog.messages == ["disk full; training goes on without a timeline"]


def test_a_file_of_rank_0_that_cannot_be_written_is_one_line_on_all_ranks(launcher, caplog, monkeypatch):
    monkeypatch.setattr(sending, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(sending, "LOOK_SECONDS", 0.02)

    def body(rank):
        world, settings = launcher(rank, 2, timeline="/no/such/folder/trace.json")
        engine, recorder = start.connect(world, settings), Recorder()
        recorder.follow(engine, world, settings)
        until(lambda: not recorder.is_recording)
        engine.barrier()
        engine.shutdown()
        recorder.leave()

    with caplog.at_level(logging.INFO, "collectives"):
        in_threads(2, body, PATIENCE)
    found = {each.levelname: each.getMessage() for each in caplog.records if "without a timeline" in each.getMessage()}
    assert "/no/such/folder/trace.json" in found["WARNING"]
    assert "rank 1 is not recorded, because rank 0 records nothing" in found["INFO"]


@pytest.mark.parametrize("why", ["closed", "alone"])
def test_without_rank_0_a_rank_gives_up(why, rendezvous, monkeypatch):
    monkeypatch.setattr(sending, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(sending, "CONNECT_SECONDS", PATIENCE if why == "closed" else 0.05)
    begin = time.monotonic()
    reasons = {
        "closed": "cannot send its timeline to rank 0",
        "alone": "is not recorded, because rank 0 records nothing",
    }
    with pytest.raises(DocumentError, match=f"rank 1 {reasons[why]}"):
        Sender(rendezvous(1), lambda: why == "closed" and time.monotonic() > begin + 0.05)


def test_without_a_store_rank_0_records_itself(path, launcher, caplog):
    world, settings = launcher(0, 2, timeouts=Timeouts(connect=0.05))
    lost = TimelineAddress(World(world.job, 0, world.topology, "node", ("127.0.0.1", 1)), settings, "127.0.0.1")
    made = Gathering(Document(str(path)), lost)
    made._receiver._thread.join()
    made.write([record(1, 0)])
    made.close()
    assert names(path) == ["1"]
    assert "the timeline has no records of other ranks" in caplog.text
