"""A newcomer in a job whose script calls several elastic functions, without that job."""

import threading

import pytest

from collectives.api import ShutDownError, Topology, World
from executors.driver.member import WorkerIdentity
from executors.job.worlds import CALL, Published, Report, WorldCall, report_key, world_key
from hvd_cluster.core.worlds import Worlds
from tests.hvd_cluster.elastic.stores import JobStore

SECONDS = 30.0
RETURNED = WorldCall(1, has_returned=True)
WORLD = World("job", 0, Topology(hosts=(), cores=0), "a", ("127.0.0.1", 1))


@pytest.fixture
def store(monkeypatch):
    """Of a driver whose ranks have returned from the first call."""
    monkeypatch.setattr("executors.driver.member.AGAIN_SECONDS", 0.01)
    store = JobStore()
    store.set(CALL, RETURNED.encode())
    return store


@pytest.fixture
def start(store):
    """Starts the worlds of a process; the threads of all end with the test."""
    found = []

    def begin(is_newcomer=True):
        found.append(Worlds(WorkerIdentity("worker-2", 0, is_newcomer), WORLD, store, 1.0, lambda: None))
        return found[-1]

    yield begin
    end(store)
    for worlds in found:
        worlds._member._thread.join(SECONDS)
        assert not worlds._member._thread.is_alive()


def end(store):
    store.set(world_key(0), Published(0, text="all is done", is_over=True).encode())


def test_it_waits_for_the_next_call_and_has_missed_this_one(store, start, caplog):
    newcomer = start()
    beginning = threading.Timer(0.3, store.set, (CALL, WorldCall(2).encode()))
    beginning.start()
    assert newcomer.begin_call()
    assert not newcomer.begin_call()
    beginning.join(SECONDS)
    assert caplog.messages == [
        "worker-2 waits for the next call of an elastic function: the ranks have returned from call 1",
        "worker-2 joins the job in call 2 of elastic functions; here, the calls before it return None",
    ]


def test_it_waits_until_the_job_is_over(store, start):
    newcomer = start()
    ending = threading.Timer(0.05, end, (store,))
    ending.start()
    with pytest.raises(ShutDownError, match="the job is over: all is done"):
        newcomer.begin_call()
    ending.join(SECONDS)


def test_one_that_waits_for_its_first_world_is_alone_until_it_has_one(store, start):
    newcomer = start()
    end(store)
    with pytest.raises(ShutDownError, match="the job is over: all is done"):
        newcomer.join("abc")
    assert newcomer.is_alone
    assert newcomer.is_over


def test_it_leaves_after_the_elastic_timeout_and_that_is_no_failure(store, start):
    newcomer = start()
    newcomer._timeout = 0.03
    with pytest.raises(ShutDownError, match=r"worker-2 leaves the job: the ranks began no call .* within 0.03 s"):
        newcomer.begin_call()
    assert Report.decode(store.get(report_key("worker-2", 0), 0.0)) == Report("behind")


def test_a_rank_does_not_wait_for_itself(start):
    assert not start(is_newcomer=False).begin_call()
