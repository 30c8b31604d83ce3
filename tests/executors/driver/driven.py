"""A driver over agents that only note what they are asked for; the clock of the loop is the test's."""

from executors.driver.driver import Driver
from executors.failures import Failure, FailureKind, Patience
from executors.job.worlds import Published, Report, report_key, world_key
from executors.membership import Limits

KILLED = Failure(FailureKind.SIGNAL, "was killed by signal 9", -9, ("last line",))
EXITED = Failure(FailureKind.EXIT, "ended with exit code 3", 3)
LOST = Failure(FailureKind.LOST_PEER, "ended with exit code 1", 1)
RAISED = Failure(FailureKind.EXCEPTION, "raised", error=KeyError("x"))
PROCESSES = Patience()


class Agents:
    """Notes the calls; ``wait`` lets the time pass, and ``call`` runs what other threads have handed over."""

    def __init__(self):
        self.now = 100.0
        self.started, self.stopped, self.killed, self.ended = {}, [], [], []
        self._alarms, self._calls = [], []

    def start(self, worker, host, environment):
        self.started[worker] = {"host": host, **environment}

    def stop(self, worker):
        self.stopped.append(worker)

    def kill(self, worker):
        self.killed.append(worker)

    def end(self, spare=None):
        self.ended.append(spare)

    def after(self, seconds, action):
        self._alarms.append((self.now + seconds, action))

    def soon(self, action):
        self._calls.append(action)

    def call(self):
        while self._calls:
            self._calls.pop(0)()

    def wait(self, seconds):
        end = self.now + seconds
        while due := sorted((alarm for alarm in self._alarms if alarm[0] <= end), key=lambda alarm: alarm[0]):
            self._alarms.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = end


def elastic(size, least=1, most=None, **limits):
    return Limits(size, least, most or size, **limits)


def begun(limits, job, agents, patience=PROCESSES, **hosts):
    driver = Driver(limits, job, agents, 30.0, lambda: agents.now, patience=patience)
    driver.found(hosts or {"a": limits.most})
    for worker in agents.started:
        driver.up(worker)
    return driver


def published(job, round):
    return Published.decode(job.store.get(world_key(round), 0.0))


def report(job, agents, worker, number, **fields):
    job.store.set(report_key(worker, number), Report(**fields).encode())
    agents.call()
