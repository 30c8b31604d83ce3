"""The ranks that others wait for, from simulated arrivals of all ranks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.controller.messages import WaitReport, Waits
from collectives.stalls.stragglers import (
    TRAILING_REPORTS,
    Cause,
    Straggler,
    StragglerInspector,
    Totals,
    WaitWindows,
    laggards,
)

STEPS = 20


class Simulation:
    """Ranks of a job that take steps: each comes to an operation of all ranks, and waits there for the last one.

    ``arrivals(rank)`` returns the seconds of a rank's computation in a step, ``work(rank)`` those of its part of an
    operation. ``changes`` are those that the inspector finds, each with the number of the step.
    """

    def __init__(self, size, arrivals, work=lambda rank: 0.0, process_set=0):
        self.size, self._arrivals, self._work, self._set = size, arrivals, work, process_set
        self._members = tuple(range(size))
        self.inspector = StragglerInspector(size, lambda id: self._members if id == process_set else ())
        self._windows = [WaitWindows(size) for _ in range(size)]
        self._late, self._inside, self._times = [0.0] * size, [0.0] * size, [0] * size
        self._now, self.steps, self.reports, self.changes = 0.0, 0, 0, []

    def step(self):
        came = [self._now + self._arrivals(rank) for rank in self._members]
        done = [self._work(rank) for rank in self._members]
        for rank in self._members:
            self._late[rank] += max(came) - came[rank]
            self._inside[rank] += max(done) - done[rank]
            self._times[rank] += max(came) - came[rank] + max(done) - done[rank] > 0.001
        self._now = max(came) + max(done)
        self.steps += 1
        for rank in self._members:
            self._look(rank)

    def _look(self, rank):
        if self._now < self._windows[rank].due:
            return
        totals = {self._set: Totals(self._late[rank], self._inside[rank], self._times[rank])}
        report = self._windows[rank].close(totals, self._now)
        if report is not None:
            self.reports += 1
            self.changes += [(self.steps, *change) for change in self.inspector.hear(rank, report, self._now)]

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    @property
    def named(self):
        return {(straggler.rank, straggler.cause) for _, straggler, is_over in self.changes if not is_over}


def noisy(chance, base, noise, delays):
    return lambda rank: base + chance.expovariate(1 / noise) + delays.get(rank, 0.0)


seeds = st.integers()
bases = st.sampled_from([0.001, 0.03, 0.1, 0.3])
slow_cases = st.tuples(st.sampled_from([2, 3, 4, 8, 16]), bases, st.floats(0.0005, 0.0025), seeds)
chance_cases = st.tuples(st.sampled_from([2, 3, 4, 8]), bases, st.floats(0.0005, 0.02), seeds)


@given(slow_cases)
@settings(max_examples=60, deadline=None)
def test_a_rank_that_is_late_by_50_ms_is_named_within_20_steps_and_no_other_one_is(case):
    size, base, noise, seed = case
    chance = random.Random(seed)
    slow = chance.randrange(size)
    simulation = Simulation(size, noisy(chance, base, noise, {slow: 0.05})).run(STEPS)
    assert simulation.named == {(slow, Cause.LATE)}
    [straggler] = simulation.inspector.stragglers
    assert straggler.seconds == pytest.approx(0.05, abs=0.04 + 2 * noise)
    assert 0.05 < straggler.share <= 1.0
    assert simulation.run(200).named == {(slow, Cause.LATE)}


@given(chance_cases)
@settings(max_examples=6, deadline=None)
def test_ranks_that_are_late_by_chance_are_not_named(case):
    """Some jobs are unlucky, and this test is good at finding them: one of five may be."""
    size, base, noise, seed = case
    jobs = [Simulation(size, noisy(random.Random(f"{seed}.{job}"), base, noise, {})).run(300) for job in range(5)]
    assert sum(bool(job.named) for job in jobs) <= 1


def test_pauses_of_a_rank_do_not_make_it_a_straggler():
    """A checkpoint or a validation, every fifty steps."""
    chance = random.Random(1)
    steps = noisy(chance, 0.03, 0.002, {})
    simulation = Simulation(4, lambda rank: steps(rank) + (3.0 if rank == 0 and simulation.steps % 50 == 0 else 0.0))
    assert not simulation.run(1000).named


def test_a_rank_that_is_slow_inside_of_operations_is_told_from_a_late_one():
    simulation = Simulation(4, lambda rank: 0.03, lambda rank: 0.05 if rank == 2 else 0.01).run(STEPS)
    assert simulation.named == {(2, Cause.BACKEND)}
    [straggler] = simulation.inspector.stragglers
    assert straggler.seconds == pytest.approx(0.04)


def test_all_ranks_of_a_slow_host_are_named():
    delays = {2: 0.05, 3: 0.052}
    simulation = Simulation(6, lambda rank: 0.03 + delays.get(rank, 0.0)).run(STEPS)
    assert simulation.named == {(2, Cause.LATE), (3, Cause.LATE)}


def test_a_rank_that_is_faster_than_all_others_names_nobody():
    assert not Simulation(4, lambda rank: 0.01 if rank == 3 else 0.06).run(100).named


def test_a_straggler_that_catches_up_is_none_any_more_and_healthy_ranks_send_nothing():
    delays = {1: 0.05}
    simulation = Simulation(3, lambda rank: 0.03 + delays.get(rank, 0.0)).run(STEPS)
    assert simulation.inspector.stragglers
    delays.clear()
    simulation.run(100)
    assert not simulation.inspector.stragglers
    assert [is_over for _, _, is_over in simulation.changes] == [False, True]
    sent = simulation.reports
    simulation.run(1000)
    assert simulation.reports == sent


def test_large_jobs_report_less_often():
    reports = {}
    for size in (4, 256):
        simulation = Simulation(size, lambda rank: 0.01 if rank else 0.06).run(40)
        reports[size] = simulation.reports / (size - 1)
    assert reports[256] <= 2 < 5 <= reports[4]


def test_a_rank_that_waits_in_one_set_is_not_blamed_in_another():
    """Rank 1 is late on the set of 0 and 1; so rank 0 comes late to the set of 0 and 2."""
    sets = {1: (0, 1), 2: (0, 2)}
    inspector = StragglerInspector(3, lambda id: sets.get(id, ()))
    reports = {
        0: WaitReport(0.25, (Waits(1, 0.15, 0.0, 3),)),
        2: WaitReport(0.25, (Waits(2, 0.15, 0.0, 3),)),
    }
    changes = [
        change
        for turn in range(40)
        for rank, report in reports.items()
        for change in inspector.hear(rank, report, turn * 0.25)
    ]
    assert [(straggler.rank, straggler.process_set) for straggler, _ in changes] == [(1, 1)]


def test_a_silent_rank_is_stopped_until_it_answers():
    inspector = StragglerInspector(2, lambda id: (0, 1))
    [(straggler, is_over)] = inspector.silent([1], 1.5)
    assert (straggler.rank, straggler.cause, straggler.seconds, is_over) == (1, Cause.STOPPED, 1.5, False)
    assert inspector.silent([1], 2.5) == []
    assert inspector.stragglers == (straggler,)
    assert inspector.answered(0) == []
    assert inspector.answered(1) == [(straggler, True)]
    assert inspector.stragglers == ()


def test_only_a_report_of_its_own_shows_that_a_silent_rank_goes_on():
    inspector = StragglerInspector(3, lambda id: (0, 1, 2))
    inspector.silent([1, 2], 1.5)
    assert inspector.hear(0, WaitReport(2.0, (Waits(0, 2.0, 0.0, 1),)), 0.0) == []
    [(straggler, is_over)] = inspector.hear(2, WaitReport(2.0, (Waits(0, 2.0, 0.0, 1),)), 0.1)
    assert (straggler.rank, is_over) == (2, True)
    assert [each.rank for each in inspector.stragglers] == [1]


@pytest.mark.parametrize(("seconds", "process_set"), [(0.0, 0), (1.0, 7)])
def test_a_report_without_time_or_about_an_unknown_set_changes_nothing(seconds, process_set):
    report = WaitReport(seconds, (Waits(process_set, 1.0, 0.0, 1),))
    inspector = StragglerInspector(2, lambda id: (0, 1) if id == 0 else ())
    assert not [change for turn in range(20) for change in inspector.hear(0, report, turn)]


def test_a_window_has_what_was_waited_in_it():
    windows = WaitWindows(2)
    assert windows.close({0: Totals(5.0, 1.0, 9)}, 10.0) is None  # it only begins
    assert windows.due == pytest.approx(10.25)
    report = windows.close({0: Totals(5.1, 1.2, 11), 3: Totals(0.0, 0.0, 0)}, 11.0)
    assert report.seconds == 1.0
    [waits] = report.waits
    assert (waits.process_set, waits.times) == (0, 2)
    assert (waits.late, waits.inside) == (pytest.approx(0.1), pytest.approx(0.2))
    trailing = [windows.close({0: Totals(5.1, 1.2, 11)}, 12.0 + turn) for turn in range(TRAILING_REPORTS + 1)]
    assert trailing == [WaitReport(1.0)] * TRAILING_REPORTS + [None]


def test_a_window_has_the_wait_for_a_core_in_it():
    """A rank for which the others wait has no waits itself, but tells of that one."""
    windows = WaitWindows(2)
    assert windows.close({}, 10.0, 7.0) is None
    assert windows.close({}, 11.0, 7.25) == WaitReport(1.0, (), 0.25)
    trailing = [windows.close({}, 12.0 + turn, 7.25) for turn in range(TRAILING_REPORTS + 1)]
    assert trailing == [WaitReport(1.0)] * TRAILING_REPORTS + [None]
    assert windows.close({}, 20.0, 7.26) is None  # too short to matter


@pytest.mark.parametrize(
    ("more", "share", "lacks"),
    [(0.0, 0.23, False), (0.1, 0.23, False), (0.12, 0.23, True), (0.4, 0.23, True), (0.0, 0.0, False)],
)
def test_a_rank_lacks_cores_if_its_wait_for_one_is_half_of_the_waits_for_it(more, share, lacks):
    assert Straggler(1, 0, Cause.LATE, 0.05, share, 0.9, more).lacks_cores is lacks


@pytest.mark.parametrize(("usual", "lacks"), [(0.0, True), (0.05, False)])
def test_a_straggler_has_its_average_wait_for_a_core_over_the_windows_of_the_evidence(usual, lacks):
    """Where the others wait for cores almost as long, that does not make them wait for the straggler."""
    inspector, changes = StragglerInspector(2, lambda process_set: (0, 1)), []
    for turn in range(12):
        changes += inspector.hear(1, WaitReport(0.25, (), 0.05 if turn % 2 else 0.15), turn * 0.25)
        changes += inspector.hear(0, WaitReport(0.25, (Waits(0, 0.2, 0.0, 4),), usual), turn * 0.25 + 0.01)
    [(straggler, is_over)] = changes
    assert (straggler.rank, straggler.cause, is_over) == (1, Cause.LATE, False)
    assert straggler.queued == pytest.approx((0.6 + 0.2 + 0.6) / 3)
    assert straggler.queued_more == pytest.approx(straggler.queued - usual / 0.25)
    assert straggler.lacks_cores is lacks


def test_waits_for_a_core_alone_name_nobody():
    """Where no rank waits for another one, they hold up nobody."""
    inspector = StragglerInspector(2, lambda process_set: (0, 1))
    for turn in range(40):
        for rank in (0, 1):
            assert inspector.hear(rank, WaitReport(0.25, (), 0.1 * rank), turn * 0.25) == []


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ({}, ((), 0.0)),
        ({0: 1.0}, ((), 0.0)),
        ({0: 1.0, 1: 0.0}, ((1,), 1.0)),
        ({0: 5.0, 1: 0.5, 2: 5.5, 3: 0.0}, ((1, 3), 5.25)),
        ({0: 0.0, 1: 0.0, 2: 0.0, 3: 5.0}, ((), 0.0)),
        ({0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}, ((), 0.0)),
    ],
)
def test_the_widest_gap_separates_laggards(waits, expected):
    ranks, wait = laggards(waits)
    assert (tuple(sorted(ranks)), wait) == expected


def test_a_rank_that_becomes_late_among_ranks_that_are_late_by_chance_is_named_after_a_while():
    """At first it must be told from chance."""
    chance, delays = random.Random(3), {}
    simulation = Simulation(4, lambda rank: 0.03 + chance.expovariate(100) + delays.get(rank, 0.0)).run(300)
    assert not simulation.named
    delays[2] = 0.05
    assert simulation.run(300).named == {(2, Cause.LATE)}


def test_a_few_long_waits_at_the_start_do_not_excuse_a_rank():
    """As where four ranks share two fast cores: later waits are too short to count."""
    simulation = Simulation(4, lambda rank: 0.0001 + (0.05 if rank == late else 0.0))
    for late, steps in ((1, 1), (2, 1), (3, 1), (None, 150), (0, 30)):  # noqa: B007 - the simulation reads it
        simulation.run(steps)
    assert simulation.named == {(0, Cause.LATE)}
