"""The worker of one task, without Spark: its rendezvous server is in this process."""

import pickle
import socket
import sys
import time
from contextlib import closing

import pytest
from spark_cluster import eventually

from collectives.api import PeerLostError
from collectives.handshake import entries
from collectives.net.frames import HEADER_BYTES, LENGTH, unseal
from collectives.store.client import RendezvousClient
from collectives.store.memory import PrefixStore
from executors.agents.spark.connection import FAILURE, DriverConnection
from executors.agents.spark.plan import Plan
from executors.agents.spark.rendezvous import TaskLocation, TaskMember
from executors.agents.spark.worker import OVER, TaskWorker
from executors.api import CommandNotFoundError, JobSecret
from executors.driver.outcome import Outcome
from executors.job.call import Call, pickle_call
from executors.job.job import Job
from executors.job.worlds import assign_ranks

SECRET = JobSecret()
HOST = "127.0.0.1"
HANG_S = 50  # less than a test may take


def plan_of(function, *args, size=2, **options):
    options = {"executable": None, "start_timeout": 60.0, "grace": 5.0, "search_path": None, "feeder": None} | options
    call = pickle_call(Call.of(function, args, None))
    return Plan(call=call, size=size, secret=SECRET, console=((), 0), environment={}, nics=(), **options)


def member_of(job, store, rank=1, connection=None):
    slot = assign_ranks(["identity"] * job.size)[rank]
    return TaskMember(slot, TaskLocation("identity", "name", HOST), job.environment(slot), store, connection)


def fail():
    raise KeyError("enough")


def appear_and_wait(path):
    open(path, "x").close()
    time.sleep(HANG_S)


@pytest.fixture
def driver_and_connection():
    driver, task = socket.socketpair()
    with driver, driver.makefile("rb") as file, closing(DriverConnection(task, SECRET, b"nonce")) as connection:
        yield file, connection


def failures(driver):
    """Reads what comes to the driver until a failure does."""
    while True:
        message = driver.read(LENGTH.unpack(driver.read(HEADER_BYTES))[0])
        if message[:1] == FAILURE:
            yield pickle.loads(unseal(SECRET.key, b"nonce", message[1:]))


@pytest.mark.leaves("processes")
def test_the_end_of_the_server_ends_the_worker(driver_and_connection, tmp_path):
    path, (driver, connection) = tmp_path / "there", driver_and_connection
    with Job(2, secret=SECRET) as job:
        client = RendezvousClient(job.host, job.port, SECRET.key, 1.0)
        worker = TaskWorker(plan_of(appear_and_wait, path), member_of(job, client, 1, connection))
        worker.__enter__().start()
        eventually(path.exists, 60)
    worker.__exit__(None, None, None)
    client.close()
    assert next(failures(driver)) == worker.outcome
    assert worker.outcome.consequence
    with pytest.raises(PeerLostError, match="rank 1 on name lost the task of rank 0"):
        worker.outcome.unwrap()


@pytest.mark.leaves("processes")
def test_the_driver_hears_of_a_failure_while_the_task_waits_for_its_input(driver_and_connection):
    driver, connection = driver_and_connection
    with Job(1, secret=SECRET) as job:
        with TaskWorker(plan_of(fail, size=1), member_of(job, job.store, 0, connection)) as worker:
            worker.start()
            outcome = next(failures(driver))
        assert outcome == worker.outcome
    assert outcome.host_name == "name"
    with pytest.raises(KeyError, match="enough"):
        outcome.unwrap()


@pytest.mark.leaves("processes")
def test_the_driver_hears_of_bad_rows(driver_and_connection, tmp_path):
    driver, connection = driver_and_connection
    failure = Outcome.of(ValueError("bad row"), 0, "identity", "name")
    with Job(1, secret=SECRET) as job:
        plan = plan_of(appear_and_wait, tmp_path / "there", size=1)
        with TaskWorker(plan, member_of(job, job.store, 0, connection)) as worker:
            worker.start()
            worker.fail(failure)
        assert next(failures(driver)) == failure


def error_of(plan):
    """The error of the only worker of ``plan`` in the driver."""
    with Job(1, secret=SECRET) as job:
        with TaskWorker(plan, member_of(job, job.store, 0)) as worker:
            worker.start()
        return worker.outcome.exception()


@pytest.mark.leaves("processes")
def test_ranks_that_wait_for_one_whose_function_has_returned_hear_of_it(monkeypatch):
    monkeypatch.setattr(entries, "LOOK_SECONDS", 0.0)
    with Job(2, secret=SECRET) as job:
        store = PrefixStore(job.store, job.id)
        with TaskWorker(plan_of(int), member_of(job, job.store)) as worker:
            worker.start()
            store.get(entries.KEY, HANG_S)
            with pytest.raises(
                PeerLostError, match=r"rank 1 on host name returned and did not come to this hvd\.init\(\)"
            ):
                entries.EndWatch(store).check()
            job.store.set(OVER, b"")


@pytest.mark.leaves("processes")
def test_a_host_has_the_name_that_people_know():
    assert str(error_of(plan_of(sys.exit, 3, size=1))).startswith("rank 0 on name called sys.exit(3)")


def test_a_python_that_is_not_there():
    error = error_of(plan_of(fail, size=1, executable="/nope/python"))
    assert isinstance(error, CommandNotFoundError)
    assert "'/nope/python' that can be executed on name" in str(error)


def test_a_failure_before_the_start_is_that_of_the_rank(driver_and_connection):
    driver, connection = driver_and_connection
    failure = Outcome.of(OSError("no file"), 0, "identity", "name")
    with Job(2, secret=SECRET) as job:
        job.store.set("launcher/ended/1", b"")
        with TaskWorker(plan_of(fail), member_of(job, job.store, 0, connection)) as worker:
            worker.fail(failure)
            assert worker.stopped()
        assert job.store.get(OVER, 0) == b""
    assert next(failures(driver)) == failure == worker.outcome
