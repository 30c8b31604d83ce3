"""A job as its membership sees it: events come, actions follow, and the clock is the test's."""

from executors.membership import (
    HostFound,
    Limits,
    Members,
    Membership,
    Publish,
    Start,
    Tick,
    WorkerFailed,
    WorkerReady,
    WorldFormed,
)


class Job:
    """A membership, its clock, and the actions of the last event."""

    def __init__(self, size, least=None, most=None, **limits):
        limits = Limits(size, least or size, most or size, **limits)
        self.membership = Membership(limits, lambda: 0.5)
        self.now = 100.0

    def on(self, *events):
        """The actions that follow from ``events``."""
        return [action for event in events for action in self.membership.handle(event, self.now)]

    def after(self, seconds):
        """The actions of a tick after ``seconds``."""
        self.now += seconds
        return self.on(Tick())

    def form(self):
        return self.on(WorldFormed(self.membership.published.round))

    @property
    def counts(self):
        counts = self.membership.counts
        return counts.failures, counts.resizes, counts.preemptions


def workers(*numbers):
    return tuple(f"worker-{number}" for number in numbers)


def world(round, *numbers, planned=False):
    return Publish(Members(round, workers(*numbers)), planned)


def start(number, host):
    return Start(f"worker-{number}", host)


def failed(number):
    return WorkerFailed(f"worker-{number}", "killed by signal 9")


def ready(number):
    return WorkerReady(f"worker-{number}")


def running(size=3, least=2, most=None, hosts=None, **limits):
    """A job of workers on host a, or on ``hosts`` with their slots, whose first world has formed."""
    job = Job(size, least, most, **limits)
    for host, slots in (hosts or {"a": size}).items():
        job.on(HostFound(host, slots))
    assert job.form() == []
    return job
