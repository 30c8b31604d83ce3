"""The values of a function on the workers of a job."""

import pickle

from collectives.api import ShutDownError
from executors.agents.hosts.run import FunctionOutcomes
from executors.driver.outcome import capture


class Driver:
    """That of a job that is over: it heeds no failure."""

    members = ("worker-0", "worker-1", "worker-2")

    def failed(self, worker, failure):
        pass


class Job:
    driver = Driver()

    def after(self, seconds, action):
        pass

    def end(self, spare=None):
        pass


def too_late():
    raise ShutDownError("the job is over: the job is done")


def test_a_newcomer_that_came_when_the_others_were_done_has_no_value():
    outcomes = FunctionOutcomes()
    for number, function in enumerate([lambda: "a", too_late, lambda: "c"]):
        message = capture(function, number, "h")
        assert pickle.loads(message).rank == number
        outcomes.received(Job(), number, message)
    assert outcomes.values(["worker-2", "worker-1", "worker-0"]) == ["c", "a"]
    assert [outcomes.has_returned(number) for number in range(4)] == [True, False, True, False]
