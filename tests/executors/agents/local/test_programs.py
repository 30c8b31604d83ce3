"""What the workers of a job of processes report, and the values of their functions."""

from contextlib import ExitStack

import pytest

from collectives.api import ShutDownError
from executors.agents.local.job import FunctionProgram, ProcessJob
from executors.agents.local.supervisor import Ended, MessageReceived, WorkerStarted
from executors.driver.outcome import capture
from executors.job.job import Job
from executors.job.output import Output
from executors.membership import Limits


class Driver:
    """Notes the calls; that of a job that is over heeds no failure."""

    members = ("worker-0", "worker-1", "worker-2")
    order = ("worker-2", "worker-1", "worker-0")

    def __init__(self):
        self.calls = []

    def up(self, worker):
        self.calls.append(("up", worker))

    def failed(self, worker, failure):
        self.calls.append(("failed", worker, failure.exit_code))

    def done(self, worker):
        self.calls.append(("done", worker))

    def host_lost(self, host, text, has_returned):
        self.calls.append(("lost", [worker for worker in self.members if has_returned(worker)]))


class Functions(ProcessJob):
    def __init__(self):
        limits = Limits(3, 1, 3)
        super().__init__(limits, Job(3), FunctionProgram(), Output(3), 30.0, None)
        self.workers = dict(enumerate(Driver.members))
        self.driver = Driver()
        self.alarms = []

    def start(self, worker, host, environment):
        pytest.fail("nobody starts workers here")

    def stop(self, worker):
        pytest.fail("nobody stops workers here")

    kill = stop

    def end(self, spare=None):
        pytest.fail("the time has not passed")

    def after(self, seconds, action):
        self.alarms.append(action)


@pytest.fixture
def job():
    with ExitStack() as stack:
        job = Functions()
        job._open(stack)
        yield job


def too_late():
    raise ShutDownError("the job is over: the job is done")


def hear(job, *functions):
    for number, function in enumerate(functions):
        job.happened(MessageReceived(number, capture(function, number, "h")))


def test_a_newcomer_that_came_when_the_others_were_done_has_no_value(job):
    hear(job, lambda: "a", too_late, lambda: "c")
    assert job.values() == ["c", "a"]


def test_a_lost_host_takes_no_value_that_has_come(job):
    hear(job, lambda: "a", too_late)
    job.host_lost("h", "gone")
    assert job.driver.calls[-1] == ("lost", ["worker-0"])


def test_a_function_is_up_when_it_says_so_and_done_when_its_process_is(job):
    job.happened(WorkerStarted(0, 4711))
    assert job.driver.calls == []
    job.happened(MessageReceived(0, b""))
    hear(job, lambda: "a")
    assert job.driver.calls == [("up", "worker-0")]
    job.happened(Ended(0, 0))
    job.happened(Ended(1, 3))
    assert job.driver.calls[1:] == [("done", "worker-0"), ("failed", "worker-1", 3)]


def test_functions_that_have_all_returned_may_take_a_while_to_end(job):
    hear(job, lambda: "a", lambda: "b")
    assert job.alarms == []
    hear(job, lambda: "a", lambda: "b", lambda: "c")
    assert job.alarms == [job.end]
