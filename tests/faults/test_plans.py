"""Plans can be played again, and shrunk to what fails."""

import random
from dataclasses import replace

import pytest

from tests.faults.events import NODE_SECONDS, TWO_HOSTS, Ambush, Blow, draw
from tests.faults.plans import Event, Plan, fewest, fitting, shrink


def drawn(count, seed=3):
    generator = random.Random(seed)
    events = tuple(Event(draw(generator, 3, 4, TWO_HOSTS, (1,)), grow=2) for _ in range(count))
    return Plan("hosts", 4, "torch", "batches", events)


def test_a_plan_as_text():
    plan = drawn(50)
    plan = replace(plan, events=(*plan.events, Event((Ambush("stop", "before the return", 1, 2.0),), ends=True)))
    assert Plan.decode(plan.encode()) == plan


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_event_for_another_number_of_ranks_leaves_one_alone(size):
    for event in drawn(300).events:
        parts = fitting(event, size).parts
        removed = {rank for part in parts if isinstance(part, Blow) for rank in part.removes}
        assert len(removed) < size
        assert removed <= set(range(size))


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("guilty", [{0}, {0, 7}, {3, 4, 39}])
def test_the_fewest_items_that_fail(count, guilty):
    guilty = {each % count for each in guilty}
    assert set(fewest(tuple(range(count)), lambda items: guilty <= set(items))) == guilty


PLANTED = Ambush("kill", "before the sync", 0)


def fails_as_planted(plan):
    """A fault in a recovery: a rank is killed at the sync while the link is slow, if the job had lost one before."""
    events = plan.events
    hit = [number for number, event in enumerate(events) if any(_is_planted(part) for part in event.parts)]
    return plan.ranks >= 3 and bool(hit) and any(_is_kill(part) for event in events[: hit[-1]] for part in event.parts)


def _is_planted(part):
    return isinstance(part, Ambush) and (part.kind, part.point) == (PLANTED.kind, PLANTED.point)


def _is_kill(part):
    return isinstance(part, Blow) and part.kind == "kill"


def test_a_planted_fault_is_shrunk_to_its_shortest_form():
    before, after = drawn(20).events, drawn(20, seed=4).events
    slow = Blow("slow", 1, seconds=NODE_SECONDS)
    fault = Event((slow, Blow("kill", 2, at=0.2), replace(PLANTED, count=2, late=True)), grow=3)
    plan = replace(drawn(0), events=(*before, fault, *after))
    tried = []

    def fails(plan):
        tried.append(plan)
        return fails_as_planted(plan)

    found = shrink(plan, fails)
    first, second = found.events
    assert (found.arena, found.ranks, found.model, found.samples) == ("local", 3, "numpy", "sampler")
    assert second == Event((replace(PLANTED, late=True),))
    assert [part.kind for part in first.parts] == ["kill"]
    assert first.parts[0].at == 0
    assert len(tried) == len(set(tried)) < 150


def test_a_long_stop_is_made_shorter_as_far_as_it_fails():
    plan = Plan("local", 2, "numpy", "sampler", (Event((Blow("stop", 1, seconds=20.0),)),))
    found = shrink(plan, lambda plan: plan.events[0].parts[0].seconds >= 4)
    assert found.events[0].parts[0].seconds == 5.0
