"""The world that a process goes on to, or leaves for, after a loss: of worker-1 and worker-2 on one host."""

import threading

import pytest

from collectives.api import NoDescriptorError, PeerLostError, Topology, World
from executors.driver.member import WorkerIdentity
from executors.job.worlds import Published, Report, report_key, world_key
from hvd_cluster.core.worlds import RemovedError, Worlds
from tests.hvd_cluster.elastic.stores import JobStore

SECONDS = 20.0
BOTH = (("worker-1", "a"), ("worker-2", "a"))


class Driver:
    """It publishes worlds, and notes what worker-2 reports."""

    def __init__(self):
        self.store = JobStore()
        self.publish(0, *BOTH)
        self.world = World("job", 0, Topology(hosts=(), cores=0), "a", ("127.0.0.1", 1))
        self.engine = None
        self.worlds = Worlds(WorkerIdentity("worker-2", 0, False), self.world, self.store, 1.0, lambda: self.engine)

    def publish(self, round, *workers, planned=False):
        self.store.set(world_key(round), Published(round, workers, planned).encode())

    def await_worlds(self, count):
        """Return when the process has heard of ``count`` worlds."""
        self.worlds._member.wait(lambda world: world.round == count - 1, SECONDS)

    def end(self, round):
        self.store.set(world_key(round), Published(round, is_over=True).encode())
        self.worlds._member._thread.join(SECONDS)
        assert not self.worlds._member._thread.is_alive()


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr("executors.driver.member.AGAIN_SECONDS", 0.01)
    monkeypatch.setattr("hvd_cluster.core.worlds.SOON_SECONDS", 0.01)
    return Driver()


def lost(*ranks):
    return PeerLostError("rank 0 does not answer", ranks)


def test_it_does_not_leave_the_others_to_a_rank_that_is_lost(driver):
    """The driver hears of the loss late, and has planned a world without this process before."""
    driver.publish(1, BOTH[0], planned=True)
    driver.await_worlds(2)
    late = threading.Timer(0.3, driver.publish, (2, BOTH[1]))
    late.start()
    assert driver.worlds.after(lost(0)).round == 2
    late.join(SECONDS)
    driver.end(3)


def test_it_leaves_the_job_to_the_others_if_it_has_no_descriptor_left(driver):
    def connect(world, attempt):
        raise NoDescriptorError(f"rank 1 cannot connect in world {world.round}: no file descriptor left")

    later = threading.Timer(0.1, driver.publish, (1, BOTH[0]))
    later.start()
    with pytest.raises(RemovedError, match="world 1 is without worker-2"):
        driver.worlds.connect(driver.world, connect)
    sent = Report.decode(driver.store.get(report_key("worker-2", 0), 0.0))
    assert (sent.kind, sent.round, sent.text.partition(":")[0]) == ("unable", 0, "rank 1 cannot connect in world 0")
    later.join(SECONDS)
    driver.end(2)


@pytest.mark.parametrize(("ranks", "members"), [((0,), ()), ((), BOTH[:1]), ((1,), BOTH[:1])])
def test_it_leaves_if_the_planned_world_is_without_the_lost_too(driver, ranks, members):
    """Also where nobody knows which rank is lost."""
    driver.publish(1, *members, planned=True)
    driver.await_worlds(2)
    with pytest.raises(RemovedError, match="world 1 is without worker-2"):
        driver.worlds.after(lost(*ranks))
    driver.end(2)


def test_a_world_that_is_planned_after_the_loss_has_none_of_the_lost(driver):
    """The lost rank has come back meanwhile, as far as its number tells."""
    driver.publish(1, *BOTH)
    driver.publish(2, *BOTH, planned=True)
    driver.await_worlds(3)
    assert driver.worlds.after(lost(0)).round == 2
    driver.end(3)


def test_a_process_may_end_when_its_reports_are_sent(driver, monkeypatch):
    """Otherwise the driver might see its end first, and not know that the ranks went on after a loss."""
    gate, send = threading.Event(), driver.store.set

    def set_later(*arguments):
        gate.wait(SECONDS)
        send(*arguments)

    monkeypatch.setattr(driver.store, "set", set_later)
    for round in range(20):
        driver.worlds.report_later(Report("formed", round))
    assert len(driver.worlds._reports) == 20
    gate.set()
    driver.worlds.await_reports()
    sent = [driver.store.peek(report_key("worker-2", number)) for number in range(20)]
    assert sorted(Report.decode(report).round for report in sent) == list(range(20))
    driver.end(1)


class Engine:
    """It keeps what its thread calls when a process of its world has ended."""

    def on_death(self, call):
        self.tell = call


def test_a_thread_that_notices_a_death_late_blames_no_rank_of_the_next_world(driver, monkeypatch):
    """This process has gone on meanwhile, and another worker has the number of the lost rank."""
    reports = []
    monkeypatch.setattr(driver.worlds, "report_later", reports.append)
    driver.engine = engine = Engine()
    driver.worlds.entered()
    driver.engine = None
    ended = PeerLostError("rank 1 is gone", [1], has_ended=True)
    driver.publish(1, *BOTH)
    driver.worlds.round = driver.worlds.after(ended).round
    engine.tell(ended)
    assert [(report.round, report.ranks) for report in reports] in ([(0, (1,))], [])
    driver.end(2)


def test_a_thread_that_notices_a_death_early_tells_the_driver(driver, monkeypatch):
    reports = []
    monkeypatch.setattr(driver.worlds, "report_later", reports.append)
    driver.engine = engine = Engine()
    driver.worlds.entered()
    ended = PeerLostError("rank 1 is gone", [1], has_ended=True)
    for _ in range(2):
        engine.tell(ended)
    assert [(report.round, report.ranks) for report in reports] == [(0, (1,))]
    driver.engine = None
    driver.end(1)
