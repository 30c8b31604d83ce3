"""The real driver as an automaton: a state and an event give the next state and its outputs, each computed once."""

import logging

from executors.driver.driver import Driver
from executors.failures import Failure, FailureKind, Patience
from executors.job.worlds import WORLDS, Published, Report
from executors.membership import WorkerDraining
from tests.protocol.essences import alarm_of, essence
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
        self.ended = set()  # the workers whose ends have been reported
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

    def is_soon(self, due):
        return due <= self.now + SOON

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


def _alarms(driver):
    """Those that will do something, each once, in their order."""
    alarms = sorted(driver._job.alarms, key=lambda alarm: alarm[0])
    first = {alarm_of(driver, action): place for place, (_, action) in reversed(list(enumerate(alarms)))}
    return [alarms[place] for alarm, place in sorted(first.items(), key=lambda item: item[1]) if alarm is not None]


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

    def __init__(self, limits, is_reduced=True):
        self.is_reduced = is_reduced
        self._drivers = []
        self._numbers = {}
        self._formed = [-1]  # for the number None, that of an end
        self._olds = []  # for each state the name of a worker or host by that in its essence
        self._transitions = {}
        surroundings = Surroundings()
        driver = Driver(limits, surroundings, surroundings, NEVER, Clock(surroundings), patience=Patience())
        driver._membership._jitter = no_jitter
        self._add(driver)

    def __len__(self):
        return len(self._drivers)

    def _add(self, driver):
        """The number of its state, and the names there of the workers and hosts that have another one here."""
        key, names = essence(driver) if self.is_reduced else (key_of(driver, driver._job.now), {})
        number = self._numbers.setdefault(key, len(self._drivers))
        if number == len(self._drivers):
            self._drivers.append(driver)
            self._formed.insert(-1, driver._membership.formed.round)
            self._olds.append({new: old for old, new in names.items()})
        olds = self._olds[number]
        return number, {name: olds[new] for name, new in names.items() if olds[new] != name}

    def after(self, number, event):
        """The number of the state after ``event`` in state ``number``, the outputs, and new names for then."""
        if (number, event) not in self._transitions:
            driver = cloned(self._drivers[number])
            driver._job.outputs = []
            getattr(self, f"_{event[0]}")(driver, *event[1:])
            outputs, driver._job.outputs = tuple(driver._job.outputs), []
            if self.is_reduced:
                driver._job.alarms = _alarms(driver)
            if driver._membership._is_over:
                error = driver._deaths.end.error if driver._deaths.end else "no end"
                self._transitions[number, event] = None, (("end", error),), {}
            else:
                after, names = self._add(driver)
                self._transitions[number, event] = after, outputs, names
        return self._transitions[number, event]

    def state(self, number):
        """The driver, to look at."""
        return self._drivers[number]

    def formed(self, number):
        """The last world that has formed, as far as the driver knows."""
        return self._formed[-1 if number is None else number]

    def alarms(self, number, late=False):
        """Which alarms may be next: those that come soon, or the first one that comes ``late``."""
        job = self._drivers[number]._job
        places = sorted(range(len(job.alarms)), key=lambda place: job.alarms[place][0])
        soon = [place for place in places if job.is_soon(job.alarms[place][0])]
        if late:
            return [] if soon else places[:1]
        return soon if self.is_reduced else soon[:1]

    # Events.

    def _found(self, driver, slots):
        driver.found(dict(slots))

    def _up(self, driver, worker):
        driver.up(worker)

    def _killed(self, driver, worker):
        driver._job.ended.add(worker)
        driver.failed(worker, KILLED)

    def _done(self, driver, worker):
        driver._job.ended.add(worker)
        driver.done(worker)

    def _drain(self, driver, worker):
        driver._handle(WorkerDraining(worker))

    def _report(self, driver, worker, kind, round, lost):
        world = driver._worlds.present.get(round)
        ranks = tuple(world.rank_of(name) for name in lost) if world else ()
        if not driver.is_over:
            driver._answer(worker)[kind](Report(kind, round, ranks))

    def _ring(self, driver, place):
        """An alarm."""
        job = driver._job
        due, action = job.alarms.pop(place)
        job.now = max(job.now, due)
        action()
