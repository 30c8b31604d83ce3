"""All states of a small job, in the order of the number of events before them; or those on random ways."""

import random
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from executors.membership import Limits
from tests.protocol.driver_states import DriverStates
from tests.protocol.ranks import Protocol, Violation
from tests.protocol.saves import SavedSearch
from tests.protocol.seen import Growing, Seen
from tests.protocol.states import BOX, States

AT_ONCE = 20_000
"""So many states are followed before their followers are looked up."""
SECONDS = 60.0
"""From one save to the next."""


@dataclass
class Found:
    """The result of a search. ``cut`` counts the states whose followers were left out, because they are too many."""

    states: int = 0
    drivers: int = 0
    cut: int = 0
    ends: dict = field(default_factory=dict)
    """Each end, with the number of events that lead to it, or of ways, and one of the ways."""

    def __str__(self):
        ends = [f"{count:8d} x {end or 'success'}" for end, (count, _) in sorted(self.ends.items(), key=str)]
        return "\n".join([f"{self.states} states, {self.drivers} of the driver, {self.cut} not followed", *ends])

    @property
    def kinds(self):
        """The ends without names, numbers and causes, which differ between states that count as one."""
        return {end and re.sub(r"\(.*?\)|[\w-]+-\d+(, )?|\d+", "", end.partition(". ")[0]).strip() for end in self.ends}


class Search:
    """From ``first`` on, through up to about ``most`` of the ``states``.

    ``calm`` has the followers of each state without further faults, one after the other, and ``counts`` how many it
    has. So the next state to be followed has the number ``len(counts)``.
    """

    def __init__(self, states, first, most):
        self._states = states
        self._first = first
        self._most = most
        self._seen = Seen()
        self._calm = Growing(np.uint32)
        self._counts = Growing(np.uint8)
        self._far = 0
        self._ends = {}
        self._saved = None

    def keep_in(self, folder, job):
        """Save all there, and go on from what is there; ``job`` names what is searched."""
        columns = {"states": self._seen.states, "origins": self._seen.origins}
        columns |= {"calm": self._calm, "counts": self._counts}
        self._saved = SavedSearch(folder, job, columns, self._states.lists())
        loaded = self._saved.load()
        if loaded:
            progress, lists = loaded
            self._far, self._ends = progress["far"], {int(end): count for end, count in progress["ends"].items()}
            self._states.restore(lists)
            self._seen.restore()

    def run(self, every=SECONDS, at_once=AT_ONCE, tell=None):
        """``tell`` takes a line about the progress. Raises Violation with the way to the fault."""
        if not len(self._seen):
            self._seen.add(np.array([self._first], np.uint64), np.zeros(1, np.uint32))
        due = time.monotonic() + every
        while len(self._counts) < len(self._seen) <= self._most:
            self._follow(self._seen.states[len(self._counts) :][:at_once].tolist())
            if time.monotonic() >= due:
                self._pause(tell)
                due = time.monotonic() + every
        self._pause(tell)
        self._check_ends()
        return self._found()

    def _pause(self, tell):
        if self._saved:
            self._saved.save({"far": self._far, "ends": self._ends})
        if tell:
            tell(f"{len(self._seen)} states, of which {len(self._counts)} are followed; {self._states.sizes}")

    def _follow(self, states):
        begin, found, calm, total = len(self._counts), [], [], []
        for number, state in enumerate(states, begin):
            followers, faults = self._next(number, state)
            found += followers
            found += faults
            calm.append(len(followers))
            total.append(len(followers) + len(faults))
        self._note(begin, np.array(found, np.uint64), np.array(calm, int), np.array(total, int))

    def _next(self, number, state):
        """The followers without and with a further fault."""
        if self._states.is_end(state) or self._states.is_far(state):
            self._far += self._states.is_far(state)
            return (), ()
        try:
            calm, faults = self._states.followers(state), self._states.faults(state)
        except Violation as violation:
            raise Violation(f"{violation} after {self.story(number)}") from violation
        if not calm:
            parts = self._states.parts(state)
            raise Violation(f"nothing can happen any more after {self.story(number)}: {parts}")
        return calm, faults

    def _note(self, begin, found, calm, total):
        """The states from ``begin`` on have ``total`` followers, of which the first ones are ``calm``."""
        numbers = self._seen.add(found, np.repeat(np.arange(begin, begin + len(total), dtype=np.uint32), total))
        places = np.arange(len(found)) - np.repeat(np.cumsum(total) - total, total)
        self._calm.extend(numbers[places < np.repeat(calm, total)])
        self._counts.extend(calm)
        ends = numbers[found & np.uint64((1 << BOX) - 1) == 0]
        for number, count in zip(*np.unique(ends, return_counts=True), strict=True):
            self._ends[int(number)] = self._ends.get(int(number), 0) + int(count)

    def _found(self):
        known = self._states.drivers.known
        left = len(self._seen) - len(self._counts)
        found = Found(len(self._seen), sum(each.end == "" for each in known), self._far + left)
        for number, count in self._ends.items():
            end = self._states.end(int(self._seen.states[number]))
            require_reason(end)
            found.ends[end] = count, self.story(number)
        return found

    def story(self, number):
        """The events that lead to a state; workers may have other names after each of them."""
        numbers = [number]
        while numbers[-1]:
            numbers.append(int(self._seen.origins[numbers[-1]]))
        way = [int(self._seen.states[number]) for number in reversed(numbers)]
        return [self._event(state, follower) for state, follower in pairwise(way)]

    def _event(self, state, follower):
        """The one that leads from ``state`` to ``follower``."""
        ways = [*self._states.named_followers(state), *self._states.named_faults(state)]
        return next(name for name, found in ways if found == follower)

    def _check_ends(self):
        """From each state whose followers are all known, an end must be near without any further fault."""
        reached = np.ones(len(self._seen), bool)
        reached[: len(self._counts)] = self._counts[:] == 0
        ends = np.cumsum(self._counts[:], dtype=np.int64)
        while self._reach(reached, ends):
            pass
        stuck = np.flatnonzero(~reached)
        if len(stuck):
            raise Violation(f"the job goes on for ever after {self.story(int(stuck[0]))}")

    def _reach(self, reached, ends):
        """Mark the states that have a follower that is marked, the last ones first. Returns whether there were any."""
        has_found = False
        for begin in range(len(ends) - 1 - (len(ends) - 1) % AT_ONCE, -1, -AT_ONCE):
            end = min(begin + AT_ONCE, len(ends))
            left = begin + np.flatnonzero(~reached[begin:end])
            if len(left):
                base = ends[begin] - self._counts[begin]
                marks = np.concatenate([[0], np.cumsum(reached[self._calm[base : ends[end - 1]]])])
                found = left[marks[ends[left] - base] > marks[ends[left] - self._counts[left] - base]]
                reached[found] = True
                has_found = has_found or len(found) > 0
        return has_found


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
        """The states, and the first one."""
        limits = Limits(sum(self.slots.values()), self.least, self.most, timeout=5.0)
        states = States(DriverStates(limits, is_reduced), Protocol(self.steps, is_reduced, rules))
        first = states.training if self.trains else states.first
        return states, first(self.slots, self.faults, self.changes)

    def search(self, most_states=10**6, rules=None, is_reduced=True, folder=None, **options):
        """All ways; or, if they are ``reduced``, one of those that differ in nothing that counts. Raises Violation.

        A search that is kept in ``folder`` goes on from there.
        """
        search = Search(*self.begin(rules, is_reduced), most_states)
        if folder is not None:
            search.keep_in(folder, repr((self, rules, is_reduced)))
        return search.run(**options)

    def walk(self, seed, count):
        """Go ``count`` random ways. Raises Violation."""
        states, first = self.begin(is_reduced=False)
        found, seen, choices = Found(), {first}, random.Random(seed)
        for _ in range(count):
            end, story = _way(states, first, choices, seen)
            number, shown = found.ends.get(end, (0, story))
            found.ends[end] = number + 1, shown
        found.states, found.drivers = len(seen), len(states.drivers)
        return found


def require_reason(end):
    """A text must not announce what does not follow."""
    if end is not None and end.endswith(": "):
        raise Violation(f"an error without its reason: {end!r}")


LONGEST_WAY = 2000
FAULT_CHANCE = 0.08


def _way(states, state, choices, seen):
    """The end of one random way, and its events."""
    story = []
    for _ in range(LONGEST_WAY):
        end = states.end(state)
        if end != "":
            require_reason(end)
            return end, story
        try:
            calm, faults = states.named_followers(state), list(states.named_faults(state))
        except Violation as violation:
            raise Violation(f"{violation} after {story}") from violation
        if not calm:
            raise Violation(f"nothing can happen any more after {story}: {states.parts(state)}")
        name, state = choices.choice(faults if faults and choices.random() < FAULT_CHANCE else calm)
        story.append(name)
        seen.add(state)
    raise Violation(f"the job has no end after {story[:200]}")
