"""The worker of one task, without Spark: its rendezvous server is in this process."""

import time

import pytest
from spark_cluster import eventually

from collectives.rendezvous.client import RendezvousClient
from executors.api import JobSecret
from executors.call import Call, pickle_call
from executors.job import Job
from executors.placement import assign_ranks
from executors.spark.meeting import Member, Place
from executors.spark.plan import Plan
from executors.spark.worker import Worker

SECRET = JobSecret()
HOST = "127.0.0.1"
HANG_S = 50  # less than a test may take


def plan_of(function, *args, size=2, **options):
    options = {"executable": None, "start_timeout": 60.0, "grace": 5.0, "search_path": None, "feeder": None} | options
    call = pickle_call(Call.of(function, args, None))
    return Plan(call=call, size=size, secret=SECRET, console=((), 0), environment={}, nics=(), **options)


def member_of(job, store, rank=1):
    slot = assign_ranks(["identity"] * job.size)[rank]
    return Member(slot, Place("identity", "name", HOST), job.environment(slot), store, None)


def appear_and_wait(path):
    open(path, "x").close()
    time.sleep(HANG_S)


@pytest.mark.leaves("processes")
def test_the_end_of_the_server_ends_the_worker(tmp_path):
    path = tmp_path / "there"
    with Job(2, secret=SECRET) as job:
        client = RendezvousClient(job.host, job.port, SECRET.key, 1.0)
        worker = Worker(plan_of(appear_and_wait, path), member_of(job, client), None)
        worker.__enter__()
        eventually(path.exists, 60)
    worker.__exit__(None, None, None)
    client.close()
    assert worker.outcome is None
