"""A worker's side of an elastic job, over a store in memory and over a rendezvous server."""

import threading

import pytest

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError
from collectives.store.client import RendezvousClient
from collectives.store.memory import MemoryStore
from collectives.store.server import RendezvousServer
from executors.driver.member import Member, WorkerIdentity
from executors.job.worlds import CALL, Published, Report, WorldCall, report_key, world_key

SECONDS = 30.0
KEY = b"secret"
WORKER = {"HOROVOD_ELASTIC": "1", "HOROVOD_WORKER_ID": "worker-3"}


class Heard:
    """What a member tells its listener."""

    def __init__(self):
        self.worlds = []
        self.changed = threading.Condition()

    def __call__(self, world):
        with self.changed:
            self.worlds.append(world)
            self.changed.notify_all()

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.worlds) >= count, SECONDS)


class Place:
    """A member, the store of its driver, and what it has heard."""

    def __init__(self, driver, store, round=0):
        self.driver = driver
        self.heard = Heard()
        self.member = Member(store, WorkerIdentity("worker-1", round, False), self.heard)
        self.member.start()

    def publish(self, round, **fields):
        world = Published(round, (("worker-1", "a"),), **fields)
        self.driver.set(world_key(round), world.encode())
        return world


@pytest.fixture
def server():
    with RendezvousServer(KEY, host="127.0.0.1") as server:
        yield server


@pytest.fixture(params=["memory", "server"])
def place(request):
    """With the member's thread ended at the end."""
    if request.param == "memory":
        store = MemoryStore()
        place = Place(store, store)
        yield place
        place.member.close()
        place.publish(len(place.heard.worlds))  # wakes the thread
    else:
        server = request.getfixturevalue("server")
        client = RendezvousClient("127.0.0.1", server.port, KEY, SECONDS)
        place = Place(server.store, client)
        yield place
        place.member.close()
        client.close()
    place.member._thread.join(SECONDS)
    assert not place.member._thread.is_alive()


class TestWorlds:
    def test_worlds_come_in_order(self, place):
        worlds = [place.publish(round) for round in (0, 1, 2)]
        place.heard.wait(3)
        assert place.heard.worlds == worlds
        assert place.member.newest() == worlds[2]
        assert place.member.world_of(1) == worlds[1]
        assert place.member.world_of(3) is None

    def test_those_before_one_that_has_formed_are_forgotten(self, place):
        worlds = [place.publish(round) for round in (0, 1, 2)]
        place.heard.wait(3)
        place.member.forget_before(1)
        assert [place.member.world_of(round) for round in (0, 1, 2)] == [None, *worlds[1:]]
        place.member.forget_before(2)
        assert (place.member.since(0), place.member.newest()) == (worlds[2:], worlds[2])

    def test_nothing_is_known_before(self, place):
        assert place.member.newest() is None
        assert not place.member.is_over

    def test_the_end_is_the_last_world(self, place):
        place.publish(0)
        over = place.publish(1, is_over=True, text="the job is done")
        place.heard.wait(2)
        place.member._thread.join(SECONDS)
        assert not place.member._thread.is_alive()
        assert place.member.is_over
        assert place.member.wait(lambda world: False, SECONDS) == over


class TestWaiting:
    def test_for_a_world_that_is_wanted(self, place):
        place.publish(0)
        threading.Thread(target=place.publish, args=(1,), name="publisher").start()
        assert place.member.wait(lambda world: world.round == 1, SECONDS).round == 1

    def test_in_vain(self, place):
        place.publish(0)
        place.heard.wait(1)
        with pytest.raises(CollectiveTimeoutError, match=r"worker-1: the driver published no further world .* 0.01 s"):
            place.member.wait(lambda world: False, 0.01)

    def test_until_it_is_closed(self, place):
        closing = threading.Timer(0.01, place.member.close)
        closing.start()
        with pytest.raises(HorovodInternalError, match="worker-1 waits for no more worlds: it is about to end"):
            place.member.wait(lambda world: False, SECONDS)
        closing.join(SECONDS)


def test_reports_are_numbered(place):
    place.member.report(Report("ready"))
    place.member.report(Report("failed", 3, (1,), "text"))
    reports = [Report.decode(place.driver.get(report_key("worker-1", number), 0.0)) for number in (0, 1)]
    assert reports == [Report("ready"), Report("failed", 3, (1,), "text")]


class Deaf(MemoryStore):
    """A store of a driver that does not answer for a while, or never."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.timeouts = []

    def _answer(self):
        self.times -= 1
        if self.times >= 0:
            raise PeerLostError("did not answer within 1 s")

    def set(self, key, value, timeout=None):
        self.timeouts.append(timeout)
        self._answer()
        super().set(key, value, timeout)

    def get(self, key, timeout):
        self._answer()
        return super().get(key, timeout)


def test_a_driver_that_does_not_answer_for_a_while_still_gets_a_report_once():
    store = Deaf(2)
    member = Member(store, WorkerIdentity("worker-1", 0, False), lambda world: None)
    member.report(Report("ready"))
    member.report(Report("formed"))
    found = [Report.decode(store.get(report_key("worker-1", number), 0.0)).kind for number in (0, 1)]
    assert found == ["ready", "formed"]


@pytest.mark.parametrize("close", [True, False])
def test_a_report_is_given_up_when_its_time_is_over_or_the_process_is_about_to_end(close):
    member = Member(Deaf(1000), WorkerIdentity("worker-1", 0, False), lambda world: None)
    if close:
        member.close()
    with pytest.raises(PeerLostError, match="did not answer"):
        member.report(Report("ready"), SECONDS if close else 0.0)
    assert member._store.times == 999


def test_each_try_of_a_report_waits_longer_for_a_driver_with_many_workers(monkeypatch):
    monkeypatch.setattr("collectives.net.attempts.FIRST_PAUSE", 0.001)
    store = Deaf(6)
    Member(store, WorkerIdentity("worker-1", 0, False), lambda world: None).report(Report("lost", 0))
    assert store.timeouts == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]


def test_a_driver_that_does_not_answer_for_a_while_is_not_lost():
    store = Deaf(2)
    MemoryStore.set(store, world_key(0), Published(0, is_over=True).encode())
    place = Place(store, store)
    assert place.member.wait(lambda world: True, SECONDS).round == 0
    place.member._thread.join(SECONDS)


def test_the_call_in_which_the_ranks_are(place):
    assert place.member.call() == WorldCall()
    place.driver.set(CALL, WorldCall(2).encode())
    assert place.member.call() == WorldCall(2)


def test_the_call_comes_from_a_driver_that_does_not_answer_for_a_while():
    store = Deaf(2)
    MemoryStore.set(store, CALL, WorldCall(2).encode())
    assert Member(store, WorkerIdentity("worker-1", 0, True), lambda world: None).call() == WorldCall(2)


class TestTheNextCall:
    RETURNED = WorldCall(1, has_returned=True)

    @pytest.fixture(autouse=True)
    def between_two_calls(self, place, monkeypatch):
        monkeypatch.setattr("executors.driver.member.AGAIN_SECONDS", 0.01)
        place.driver.set(CALL, self.RETURNED.encode())

    def test_the_ranks_begin_it(self, place):
        beginning = threading.Timer(0.05, place.driver.set, (CALL, WorldCall(2).encode()))
        beginning.start()
        assert place.member.call_after(self.RETURNED, SECONDS) == WorldCall(2)
        beginning.join(SECONDS)

    def test_they_never_do(self, place):
        with pytest.raises(CollectiveTimeoutError, match=r"began no call of an elastic function within 0.03 s"):
            place.member.call_after(self.RETURNED, 0.03)

    def test_the_job_ends_before(self, place):
        place.publish(0, is_over=True)
        assert place.member.call_after(self.RETURNED, SECONDS) == self.RETURNED
        assert place.member.is_over

    def test_this_member_is_closed_before(self, place):
        closing = threading.Timer(0.05, place.member.close)
        closing.start()
        with pytest.raises(HorovodInternalError, match="waits for no more worlds"):
            place.member.call_after(self.RETURNED, SECONDS)
        closing.join(SECONDS)


def test_a_driver_that_is_lost_ends_the_wait(caplog, monkeypatch):
    monkeypatch.setattr("executors.driver.member.LOST_SECONDS", 0.1)
    server = RendezvousServer(KEY, host="127.0.0.1")
    client = RendezvousClient("127.0.0.1", server.start(), KEY, 0.1)
    place = Place(server.store, client)
    place.publish(0)
    place.heard.wait(1)
    server.stop()
    with pytest.raises(HorovodInternalError, match="worker-1: the driver of the job is lost, so no further world"):
        place.member.wait(lambda world: world.round > 0, SECONDS)
    place.member.close()
    client.close()
    place.member._thread.join(SECONDS)
    assert not place.member._thread.is_alive()
    assert "the driver of the job is lost" in caplog.text


def test_a_newcomer_begins_with_the_world_that_it_was_started_in():
    store = MemoryStore()
    for round in (0, 1, 2):
        store.set(world_key(round), Published(round).encode())
    place = Place(store, store, round=2)
    place.heard.wait(1)
    assert [world.round for world in place.heard.worlds] == [2]
    place.member.close()
    place.publish(3)
    place.member._thread.join(SECONDS)


class TestIdentity:
    @pytest.mark.parametrize(
        ("variables", "identity"),
        [
            ({}, WorkerIdentity("worker-3", 0, False)),
            ({"HOROVOD_ROUND": "4", "HOROVOD_NEWCOMER": "1"}, WorkerIdentity("worker-3", 4, True)),
            ({"HOROVOD_ROUND": "4", "HOROVOD_NEWCOMER": "0"}, WorkerIdentity("worker-3", 4, False)),
        ],
    )
    def test_of_a_worker(self, variables, identity):
        assert WorkerIdentity.of({**WORKER, **variables}) == identity

    @pytest.mark.parametrize("variables", [{"HOROVOD_ELASTIC": "0"}, {"HOROVOD_WORKER_ID": ""}])
    def test_of_any_other_process(self, variables):
        assert WorkerIdentity.of({**WORKER, **variables}) is None
        assert WorkerIdentity.of({}) is None
