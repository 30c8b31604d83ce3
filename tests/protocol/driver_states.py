"""The real driver as an automaton: a state and an event give the next state and its outputs, each computed once."""

import logging
from hashlib import blake2b
from typing import NamedTuple

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
            names = [name for name, _ in world.workers]
            self.outputs += [] if world.is_over else [("world", world.planned, *names)]


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


class DriverState(NamedTuple):
    """What a search has to know of a driver. It comes to be by ``event`` from the one with the number ``origin``.

    ``olds`` has the name of each worker and host by that in its essence. ``unformed`` counts the worlds that were
    published since the last one that has formed. ``soon`` are the places of the alarms that may be next; if there are
    none, the one at ``late`` may be. ``end`` is None for success, or the error; "" while the job goes on.
    """

    origin: int
    event: tuple
    digest: bytes
    olds: dict[str, str]
    unformed: int = 0
    has_formed: bool = False
    soon: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    end: str | None = ""


class DriverStates:
    """All states of a driver with ``limits`` that a search has met, by number; 0 is the first one.

    Drivers are kept as long as there is room; others are made again, from the events that have led to them.
    """

    ROOM = 20_000

    def __init__(self, limits, is_reduced=True):
        self.is_reduced = is_reduced
        self.known = []
        self._limits = limits
        self._drivers = {}
        self._numbers = {}
        self._transitions = {}
        self._add(self._first(), 0, ())

    def __len__(self):
        return len(self.known)

    def __getitem__(self, number):
        return self.known[number]

    def _first(self):
        surroundings = Surroundings()
        driver = Driver(self._limits, surroundings, surroundings, NEVER, Clock(surroundings), patience=Patience())
        driver._membership._jitter = no_jitter
        return driver

    def extend(self, known):
        """Those of an earlier search."""
        for state in known[len(self.known) :]:
            self._numbers[state.digest] = len(self.known)
            self.known.append(state)

    def _digest(self, driver):
        """Its fingerprint of 128 bits, and the name of each worker and host there.

        Among a million drivers two have the same one with a probability of less than 1 in 10**26.
        """
        key, names = essence(driver) if self.is_reduced else (key_of(driver, driver._job.now), {})
        return blake2b(repr(key).encode(), digest_size=16).digest(), names

    def _add(self, driver, origin, event):
        """The number of its state, and the names there of the workers and hosts that have another one here."""
        digest, names = self._digest(driver)
        number = self._numbers.setdefault(digest, len(self.known))
        if number == len(self.known):
            olds = {new: old for old, new in names.items()}
            unformed = driver._worlds.published.round - driver._membership.formed.round
            alarms = self._alarms(driver._job)
            self.known.append(DriverState(origin, event, digest, olds, unformed, driver.has_formed, *alarms))
            self._keep(number, driver)
        olds = self.known[number].olds
        return number, {name: olds[new] for name, new in names.items() if olds[new] != name}

    def _end(self, error, origin, event):
        """The number of this end."""
        digest = repr(error).encode()
        number = self._numbers.setdefault(digest, len(self.known))
        if number == len(self.known):
            self.known.append(DriverState(origin, event, digest, {}, end=error))
        return number

    def _keep(self, number, driver):
        if len(self._drivers) >= self.ROOM:
            del self._drivers[next(iter(self._drivers))]
        self._drivers[number] = driver

    def _driver(self, number):
        """Those that were not used for long are at the front."""
        driver = self._drivers.pop(number, None) or self._made(number)
        self._keep(number, driver)
        return driver

    def _made(self, number):
        state = self.known[number]
        driver, _ = self._ran(state.origin, state.event) if number else (self._first(), ())
        if self._digest(driver)[0] != state.digest:
            raise RuntimeError(f"the driver is not the same again after {state.event}")
        return driver

    def _ran(self, number, event):
        """Another driver, after ``event`` in state ``number``, and the outputs."""
        driver = cloned(self._driver(number))
        driver._job.outputs = []
        getattr(self, f"_{event[0]}")(driver, *event[1:])
        outputs, driver._job.outputs = tuple(driver._job.outputs), []
        if self.is_reduced:
            driver._job.alarms = _alarms(driver)
        return driver, outputs

    def after(self, number, event):
        """The number of the state after ``event`` in state ``number``, the outputs, and new names for then."""
        if (number, event) not in self._transitions:
            self._transitions[number, event] = self._found_after(number, event)
        return self._transitions[number, event]

    def _found_after(self, number, event):
        driver, outputs = self._ran(number, event)
        if driver._membership._is_over:
            error = driver._deaths.end.error if driver._deaths.end else "no end"
            return self._end(error, number, event), (("end", error),), {}
        after, names = self._add(driver, number, event)
        if self.known[after].has_formed > self.known[number].has_formed:
            outputs = (*outputs, ("formed",))
        return after, outputs, names

    def _alarms(self, job):
        """The places of those that may come soon, or late."""
        places = sorted(range(len(job.alarms)), key=lambda place: job.alarms[place][0])
        soon = [place for place in places if job.is_soon(job.alarms[place][0])]
        return tuple(soon if self.is_reduced else soon[:1]), tuple([] if soon else places[:1])

    # Events.

    def _found(self, driver, slots):
        driver.found(dict(slots))

    def _up(self, driver, worker):
        driver.up(worker)

    def _killed(self, driver, worker):
        self._note_end(driver, worker)
        driver.failed(worker, KILLED)

    def _done(self, driver, worker):
        self._note_end(driver, worker)
        driver.done(worker)

    def _note_end(self, driver, worker):
        driver._job.ended.add(worker)
        driver._job.outputs.append(("knows", worker))

    def _drain(self, driver, worker):
        driver._handle(WorkerDraining(worker))

    def _report(self, driver, worker, kind, ago, lost):
        round = driver._worlds.published.round - (ago or 0)
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
