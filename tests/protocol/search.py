"""All states of a small job, in the order of the number of events before them; or those on random ways.

A state has a fingerprint of 64 bits, and only the states that have still to be followed are kept whole. Two states with
one fingerprint would be taken for one: among n states that happens with a probability of less than n * n / 2**65, which
is 1 in 3 million for 3 million states, if the fingerprints are spread evenly.
"""

import random
import re
from array import array
from collections import deque
from dataclasses import dataclass, field

from executors.membership import Limits
from tests.protocol.driver_states import DriverStates
from tests.protocol.forgotten import forgetting
from tests.protocol.ranks import Protocol, Violation


@dataclass
class Found:
    """The result of a search. ``cut`` counts the states whose followers were left out, because they are too many."""

    states: int = 0
    drivers: int = 0
    cut: int = 0
    ends: dict = field(default_factory=dict)
    """Each end, with the number of ways to it and one of them."""

    def __str__(self):
        ends = [f"{count:8d} x {end or 'success'}" for end, (count, _) in sorted(self.ends.items(), key=str)]
        return "\n".join([f"{self.states} states, {self.drivers} of the driver, {self.cut} not followed", *ends])

    @property
    def kinds(self):
        """The ends without names, numbers and causes, which differ between states that count as one."""
        return {end and re.sub(r"\(.*?\)|[\w-]+-\d+(, )?|\d+", "", end.partition(". ")[0]).strip() for end in self.ends}


class Search:
    """From ``first`` on, through up to ``most`` states. Raises Violation with the way to the fault."""

    def __init__(self, protocol, first, most, rounds=8):
        self._protocol = protocol
        self._most = most
        self._rounds = rounds
        self._first = self._canonical(first)
        self._numbers = {hash(self._first): 0}
        self._origins = array("q", [-1])
        self._calm = {}  # the followers of each state without further faults
        self.found = Found()

    def _canonical(self, job):
        """The state that stands for all those that are like ``job``."""
        protocol = self._protocol
        return forgetting(job, protocol.drivers.formed(job.driver)) if protocol.is_reduced else job

    def run(self):
        queue = deque([(0, self._first)])
        while queue:
            number, job = queue.popleft()
            if job.end != "":
                self._count_end(number, job.end)
            elif len(self._origins) > self._most or len(job.worlds) > self._rounds:
                self.found.cut += 1
            else:
                queue.extend(self._follow(number, job))
        self.found.states, self.found.drivers = len(self._origins), len(self._protocol.drivers)
        self._check_ends()
        return self.found

    def _follow(self, number, job):
        fresh = []
        try:
            calm, faults = self._protocol.followers(job), list(self._protocol.faults(job))
        except Violation as violation:
            raise Violation(f"{violation} after {self.story(number)}") from violation
        if not calm:
            raise Violation(f"nothing can happen any more after {self.story(number)}: {job}")
        self._calm[number] = array("q", [self._number(follower, number, fresh) for _, follower in calm])
        for _, follower in faults:
            self._number(follower, number, fresh)
        return fresh

    def _number(self, job, origin, fresh):
        job = self._canonical(job)
        number = self._numbers.setdefault(hash(job), len(self._origins))
        if number == len(self._origins):
            self._origins.append(origin)
            fresh.append((number, job))
        return number

    def _count_end(self, number, end):
        require_reason(end)
        known = self.found.ends.get(end)
        self.found.ends[end] = (known[0] + 1, known[1]) if known else (1, self.story(number))

    def story(self, number):
        """The events that lead to a state; workers may have other names after each of them."""
        numbers = [number]
        while numbers[-1]:
            numbers.append(self._origins[numbers[-1]])
        names, job = [], self._first
        for following in numbers[-2::-1]:
            name, job = self._event(job, following)
            names.append(name)
        return names

    def _event(self, job, number):
        """The one that leads from ``job`` to the state with ``number``."""
        for name, next_job in [*self._protocol.followers(job), *self._protocol.faults(job)]:
            follower = self._canonical(next_job)
            if self._numbers.get(hash(follower)) == number:
                return name, follower
        raise KeyError(number)

    def _check_ends(self):
        """From each state whose followers are all known, an end must be near without any further fault."""
        origins = {}
        for number, followers in self._calm.items():
            for follower in followers:
                origins.setdefault(follower, array("q")).append(number)
        ending = [number for number in range(len(self._origins)) if number not in self._calm]
        reached = set(ending)
        while ending:
            for origin in origins.get(ending.pop(), ()):
                if origin not in reached:
                    reached.add(origin)
                    ending.append(origin)
        stuck = min(self._calm.keys() - reached, default=None)
        if stuck is not None:
            raise Violation(f"the job goes on for ever after {self.story(stuck)}")


@dataclass(frozen=True)
class Case:
    """A job on hosts with ``slots``, of so many ranks, with so many ``faults``, and the planned ``changes`` in order.

    If it ``trains``, all of that comes after the start of the job.
    """

    slots: dict[str, int]
    least: int = 1
    most: int = 4
    faults: int = 1
    changes: tuple = ()
    steps: int = 2
    trains: bool = False

    def begin(self, rules=None, is_reduced=True):
        """The protocol, and the first state."""
        limits = Limits(sum(self.slots.values()), self.least, self.most, timeout=5.0)
        protocol = Protocol(DriverStates(limits, is_reduced), self.steps, rules)
        first = protocol.training if self.trains else protocol.first
        return protocol, first(self.slots, self.faults, self.changes)

    def search(self, most_states=10**6, rules=None, is_reduced=True):
        """All ways; or, if they are ``reduced``, one of those that differ in nothing that counts. Raises Violation."""
        return Search(*self.begin(rules, is_reduced), most_states).run()

    def walk(self, seed, count):
        """Go ``count`` random ways. Raises Violation."""
        protocol, first = self.begin(is_reduced=False)
        found, seen, choices = Found(), {first}, random.Random(seed)
        for _ in range(count):
            end, story = _way(protocol, first, choices, seen)
            number, shown = found.ends.get(end, (0, story))
            found.ends[end] = number + 1, shown
        found.states, found.drivers = len(seen), len(protocol.drivers)
        return found


def require_reason(end):
    """A text must not announce what does not follow."""
    if end is not None and end.endswith(": "):
        raise Violation(f"an error without its reason: {end!r}")


LONGEST_WAY = 2000
FAULT_CHANCE = 0.08


def _way(protocol, job, choices, seen):
    """The end of one random way, and its events."""
    story = []
    for _ in range(LONGEST_WAY):
        if job.end != "":
            require_reason(job.end)
            return job.end, story
        try:
            calm, faults = protocol.followers(job), list(protocol.faults(job))
        except Violation as violation:
            raise Violation(f"{violation} after {story}") from violation
        if not calm:
            raise Violation(f"nothing can happen any more after {story}: {job}")
        name, job = choices.choice(faults if faults and choices.random() < FAULT_CHANCE else calm)
        story.append(name)
        seen.add(job)
    raise Violation(f"the job has no end after {story[:200]}")
