"""The search over parameters: what it tries, and that noise or a load that changes does not make a job slower."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.observe.autotune.plan import FINAL_ROUNDS, FIRST_POSITIONS, plan
from collectives.observe.autotune.space import Knob, Space, Switch

SPACE = Space(
    (Knob("fusion_threshold", 1 << 16, 1 << 27), Knob("cycle_time", 0.0001, 0.1)),
    (Switch("patient", {"patient": True}),),
)
FIRST = {"fusion_threshold": 1 << 27, "cycle_time": 0.001, "patient": False}


class Random:
    """A search that learns nothing."""

    def __init__(self, seed=1):
        self.heard = []
        self._chance = random.Random(seed)

    def suggest(self):
        return [self._chance.random(), self._chance.random()]

    def register(self, positions, score):
        assert len(positions) == 2
        self.heard.append(score)


def play(measure, warmup=2, most=12, space=SPACE, search=None):
    """The choice, and the trials before it."""
    trials, tried = plan(FIRST, space, search or Random(), warmup, most), []
    changes = next(trials)
    try:
        while True:
            tried.append(changes)
            changes = trials.send(measure(changes))
    except StopIteration as end:
        return end.value, tried


def speed(changes):
    distance = math.log(changes["fusion_threshold"] / (1 << 20)) ** 2 + math.log(changes["cycle_time"] / 0.004) ** 2
    return (1.3 if changes["patient"] else 1.0) / (1.0 + 0.02 * distance)


def test_finds_faster_parameters_and_says_how_much():
    choice, _ = play(speed)
    assert choice.changes["patient"] is True
    assert choice.gain == speed(choice.changes) / speed(FIRST)
    assert choice.gain > 1.3
    assert choice.score == speed(choice.changes)


def test_the_order_of_the_trials():
    _, tried = play(speed, warmup=3, most=len(FIRST_POSITIONS) + 1)
    assert tried[:4] == [FIRST] * 4
    assert tried[4] == {**FIRST, "patient": True}
    turned = tried[5 : 6 + len(FIRST_POSITIONS)]
    assert [changes["patient"] for changes in turned] == [True] * len(turned)
    assert turned[0] == {"patient": True, **SPACE.changes(list(FIRST_POSITIONS[0][:2]))}
    final = tried[6 + len(FIRST_POSITIONS) :]
    assert final == final[:3] * FINAL_ROUNDS
    assert final[0] == FIRST


def test_a_switch_that_is_slower_goes_back():
    choice, tried = play(lambda changes: 1.0 - 0.5 * changes["patient"])
    assert choice.changes == FIRST
    assert all(not changes["patient"] for changes in tried[4:])


def test_equal_speeds_change_nothing():
    choice, _ = play(lambda changes: 5.0)
    assert (choice.changes, choice.score, choice.gain) == (FIRST, 5.0, 1.0)


def test_without_knobs_and_switches_nothing_is_tried():
    choice, tried = play(lambda changes: 5.0, warmup=1, space=Space((), ()))
    assert (choice.changes, choice.score, choice.gain) == (FIRST, 5.0, 1.0)
    assert tried == [FIRST] * 2


def test_the_search_hears_scores_relative_to_those_of_the_first_parameters():
    search = Random()
    play(lambda changes: 400.0, search=search)
    assert search.heard == [1.0] * 13


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 0.3))
def test_noise_does_not_choose_parameters_that_are_much_slower(seed, noise):
    chance = random.Random(seed)
    choice, _ = play(lambda changes: speed(changes) * (1.0 + noise * (chance.random() - 0.5)), search=Random(seed))
    assert speed(choice.changes) > speed(FIRST) * (1.0 - noise)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_a_load_that_changes_between_the_rounds_does_not_choose(seed):
    """All trials of a round are as fast, so nothing is; the first of a search may look much faster."""
    chance = random.Random(seed)
    final = []

    def measure(changes):
        final.append(changes)
        return chance.uniform(0.2, 1.0) if len(final) <= begin else loads[(len(final) - begin - 1) // 3]

    begin, loads = 1 + 1 + 6, [chance.uniform(0.2, 1.0) for _ in range(FINAL_ROUNDS)]
    choice, tried = play(measure, warmup=0, most=6, search=Random(seed))
    assert tried[begin:] == tried[begin : begin + 3] * FINAL_ROUNDS
    assert choice.changes == FIRST
