"""Which states are untouched, and which commits need a copy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.elastic.steps import COST, LONGEST_INTERVAL, Cycle, Marks, interval, needs_copy

START = Marks(batches=10, versions=100)


def marks(batches=0, versions=0):
    return Marks(START.batches + batches, START.versions + versions)


def test_gradients_alone_touch_nothing():
    assert Cycle(START).is_untouched(marks(batches=3))
    assert Cycle(START).is_safe(marks(batches=3))


def test_a_step_touches_the_state_also_if_it_moves_no_version():
    cycle = Cycle(START).step_began(marks(batches=1))
    assert not cycle.is_untouched(marks(batches=1))


def test_one_step_after_all_collectives_is_safe():
    cycle = Cycle(START).step_began(marks(batches=4))
    assert cycle.is_safe(marks(batches=4, versions=2))


def test_a_collective_after_the_step_is_not():
    cycle = Cycle(START).step_began(marks(batches=4))
    assert not cycle.is_safe(marks(batches=5, versions=2))


def test_a_second_step_after_a_collective_is_not():
    cycle = Cycle(START).step_began(marks(batches=4)).step_began(marks(batches=5, versions=2))
    assert not cycle.is_safe(marks(batches=5, versions=4))


def test_steps_of_several_optimizers_at_the_end_are_safe():
    cycle = Cycle(START).step_began(marks(batches=4)).step_began(marks(batches=4, versions=2))
    assert cycle.is_safe(marks(batches=4, versions=4))


def test_a_change_by_hand_touches_the_state():
    assert not Cycle(START).is_untouched(marks(versions=1))
    assert Cycle(START).is_safe(marks(versions=1))  # no collective at all
    assert not Cycle(START).is_safe(marks(batches=1, versions=1))


def test_a_change_by_hand_before_the_step_may_be_older_than_the_gradients():
    cycle = Cycle(START).step_began(marks(batches=4, versions=1))
    assert not cycle.is_safe(marks(batches=4, versions=2))


EVENTS = ("collective", "step", "fused step", "hand")


@given(st.lists(st.sampled_from(EVENTS), max_size=8))
def test_no_collective_can_have_found_a_safe_cycle_touched(events):
    """Against a direct model; a cycle may be called unsafe without need only after a change by hand."""
    now, cycle, touched, found_touched = START, Cycle(START), False, False
    for event in events:
        if event == "collective":
            found_touched |= touched
            now = Marks(now.batches + 1, now.versions)
            continue
        touched = True
        if "step" in event:
            cycle = cycle.step_began(now)
        if event != "fused step":
            now = Marks(now.batches, now.versions + 1)
    assert cycle.is_untouched(now) == (not touched)
    if found_touched:
        assert not cycle.is_safe(now)
    elif "hand" not in events:
        assert cycle.is_safe(now)


@given(st.floats(0, 10), st.floats(1e-6, 10))
def test_copies_in_case_cost_little(copy_seconds, cycle_seconds):
    found = interval(copy_seconds, cycle_seconds)
    assert found & (found - 1) == 0
    assert found == LONGEST_INTERVAL or copy_seconds <= COST * found * cycle_seconds * (1 + 1e-9)
    assert found == 1 or copy_seconds > COST * (found / 2) * cycle_seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    ("commit", "copy", "is_safe", "copies"),
    [(3, None, True, True), (3, 2, False, True), (3, 2, True, False), (6, 2, True, False), (8, 2, True, True)],
)
def test_commits_with_a_copy(commit, copy, is_safe, copies):
    """A copy takes 0.1 s and a cycle 1.5 s, so one in eight commits makes one in any case."""
    assert needs_copy(commit, copy, is_safe, 0.1, 1.5) is copies
