"""The real driver as an automaton: a state and an event give the next state and its outputs, each computed once."""

import logging

from executors.driver.driver import Driver
from executors.failures import Failure, FailureKind, Patience
from executors.job.worlds import WORLDS, Published
from executors.membership import WorkerDraining
from tests.protocol.snapshots import FOREVER, cloned, key_of

KILLED = Failure(FailureKind.SIGNAL, "was killed by signal 9", -9)
NEVER = 1e9
SOON = 2.0
"""Alarms that are due later come only where nothing else can happen."""


def silence():
    """The driver tells of each loss, which nobody reads here."""
    logging.getLogger("executors").setLevel(logging.CRITICAL)


def no_jitter():
    """For the cool-down of hosts."""
    return 0.0


class Surroundings:
    """Agents, job and store of a driver; ``outputs`` are what it has asked for since the last event."""

    id = "job"

    def __init__(self):
        self.now = 0.0
        self.alarms = []
        self.outputs = []
        self.sent = {}
        self.store = self

    # The agents.

    def start(self, worker, host, environment):
        self.outputs.append(("start", worker, host))

    def stop(self, worker):
        self.outputs.append(("stop", worker))

    def kill(self, worker):
        self.outputs.append(("stop", worker))

    def end(self, spare=None):
        return

    def after(self, seconds, action):
        """The alarm for the next moment of the membership takes the place of the last one."""
        if name_of(action) == "_tick":
            self.alarms = [alarm for alarm in self.alarms if name_of(alarm[1]) != "_tick"]
        if seconds < FOREVER:
            self.alarms.append((self.now + max(seconds, 0.0), action))

    def soon(self, action):
        action()

    # The job.

    def place(self, slot, is_newcomer=False):
        return {}

    def subscribe(self, observer):
        return stay

    def take(self, key):
        return self.sent.pop(key, None)

    def set(self, key, value):
        if key.startswith(WORLDS):
            world = Published.decode(value)
            self.outputs.append(("over",) if world.is_over else ("world", world))


def name_of(action):
    """That of a method; "" for a partial call."""
    return getattr(action, "__name__", "")


def stay():
    """Nothing to withdraw."""


class Clock:
    """That of the driver."""

    def __init__(self, surroundings):
        self._surroundings = surroundings

    def __call__(self):
        return self._surroundings.now


class DriverStates:
    """All states of a driver with ``limits`` that a search has met, by number; 0 is the first one."""

    def __init__(self, limits):
        self._drivers = []
        self._numbers = {}
        self._transitions = {}
        surroundings = Surroundings()
        driver = Driver(limits, surroundings, surroundings, NEVER, Clock(surroundings), patience=Patience())
        driver._membership._jitter = no_jitter
        self._add(driver)

    def __len__(self):
        return len(self._drivers)

    def _add(self, driver):
        key = key_of(driver, driver._job.now)
        number = self._numbers.setdefault(key, len(self._drivers))
        if number == len(self._drivers):
            self._drivers.append(driver)
        return number

    def after(self, number, event):
        """The number of the state after ``event`` in state ``number``, and the outputs."""
        if (number, event) not in self._transitions:
            driver = cloned(self._drivers[number])
            driver._job.outputs = []
            getattr(self, f"_{event[0]}")(driver, *event[1:])
            outputs, driver._job.outputs = tuple(driver._job.outputs), []
            if driver._membership._is_over:
                error = driver._deaths.end.error if driver._deaths.end else "no end"
                self._transitions[number, event] = None, (("end", error),)
            else:
                self._transitions[number, event] = self._add(driver), outputs
        return self._transitions[number, event]

    def state(self, number):
        """The driver, to look at."""
        return self._drivers[number]

    def alarm(self, number):
        """Whether the next alarm comes soon; None if there is none."""
        driver = self._drivers[number]
        due = [due for due, _ in driver._job.alarms]
        return min(due) <= driver._job.now + SOON if due else None

    # Events.

    def _found(self, driver, slots):
        driver.found(dict(slots))

    def _up(self, driver, worker):
        driver.up(worker)

    def _killed(self, driver, worker):
        driver.failed(worker, KILLED)

    def _done(self, driver, worker):
        driver.done(worker)

    def _drain(self, driver, worker):
        driver._handle(WorkerDraining(worker))

    def _report(self, driver, worker, report):
        if not driver.is_over:
            driver._answer(worker)[report.kind](report)

    def _ring(self, driver):
        """The next alarm."""
        job = driver._job
        due, action = min(job.alarms, key=lambda alarm: alarm[0])
        job.alarms = [alarm for alarm in job.alarms if alarm[1] is not action]
        job.now = max(job.now, due)
        action()
