"""A short campaign of 60 faults; ``scripts/faults`` runs long ones."""

import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.faults import points
from tests.faults.arena import ROOT
from tests.faults.campaign import Campaign
from tests.faults.events import Ambush, Blow
from tests.faults.hosts import HostsArena, LargeArena, Slots
from tests.faults.plans import Event
from tests.namespaces import Network, Unavailable

pytestmark = pytest.mark.timeout(400)


def test_a_short_campaign():
    lines = []
    campaign = Campaign(seed=5, events=6, ranks=3, tell=lines.append)
    campaign.run()
    assert len(campaign.played) == 6
    assert lines


MOST_MISSED = 4


def tour():
    """The named points of a world: a rank that comes by is killed, stopped, or has another clock."""
    kinds = itertools.cycle([("kill", 0.0), ("stop", 1.0), ("clock", 3600.0)])
    names = points.names(points.OF_RANKS, points.LOSS, points.CHANGE)
    sides = [name for number, name in enumerate(names) if number % 4 in {0, 3}]
    losses = [_loss(number % 3, name, *next(kinds)) for number, name in enumerate(sides)]
    grown = [_loss(0, "before the admission", "kill"), _loss(1, "after the planned change", "stop", 1.0)]
    steps = points.names(points.OF_RANKS, points.STEP)
    harmless = itertools.cycle([("stop", 1.0), ("clock", -3600.0)])
    return [
        *losses,
        *(replace(event, parts=(event.parts[0], replace(event.ambush, late=True))) for event in grown),
        Event((Blow("drain", 0), Ambush("kill", "before the notice", 1)), grow=3),
        *(
            Event((Ambush(kind, name, 0, seconds),), grow=2)
            for name, (kind, seconds) in zip(steps, harmless, strict=False)
        ),
    ]


def _loss(rank, point, kind, seconds=0.0):
    return Event((Blow("kill", rank), Ambush(kind, point, (rank + 1) % 3, seconds)), grow=3)


def test_a_tour_of_the_named_points():
    """In a long job the ranks may not vote for a while: points that nobody came by are tried in another job, once."""
    campaign = Campaign(seed=0, events=0, ranks=3, script=tour())
    campaign.run()
    assert sum(len(event.parts) for event in campaign.played) >= 36
    assert len(campaign.outcomes) == len(tour())
    missed = [event for event, outcome in zip(tour(), campaign.outcomes, strict=True) if outcome.missed]
    again = Campaign(seed=0, events=0, ranks=3, script=missed)
    again.run()
    assert len(missed) <= MOST_MISSED
    assert not [outcome for outcome in again.outcomes if outcome.missed]


def test_the_only_rank_with_the_state_may_stop_for_longer_than_the_others_wait():
    """A newcomer that waits for it ends in its place."""
    stopped = Ambush("stop", "before the connection", spared=1, seconds=6.0, late=True)
    campaign = Campaign(seed=0, events=0, ranks=2, script=[Event((Blow("kill", 1), stopped), grow=2)])
    campaign.run()
    assert [outcome.missed for outcome in campaign.outcomes] == [False]


def test_a_campaign_whose_events_spared_the_driver_kills_one_at_the_end():
    lines = []
    campaign = Campaign(seed=0, events=0, ranks=2, tell=lines.append)
    campaign.run()
    for _ in range(2):  # the second time it was not spared
        campaign.kill_spared_driver()
    assert lines == ["   0 kill the driver: no process is left"]


# The agent of the other host; in a large world rank 0 and the leader of the other host.
ON_TWO_HOSTS = (
    Event((Blow("agent", 1, beside=(2,)),)),
    _loss(1, "before the connection", "stop", 1.0),
    Event((Blow("slow", 1, seconds=1.0), Blow("kill", 0)), grow=3),
)
IN_A_LARGE_WORLD = (
    Event((Blow("kill", 0), Blow("kill", 2))),
    replace(_loss(2, "after the agreement on sets", "kill"), grow=4),
    Event((Blow("drain", 1),), grow=3),
)


@pytest.mark.parametrize(
    ("arena", "ranks", "script"),
    [(HostsArena, 3, ON_TWO_HOSTS), (LargeArena, 4, IN_A_LARGE_WORLD)],
    ids=["usual", "large"],
)
def test_a_short_campaign_on_two_hosts(arena, ranks, script):
    """Long campaigns cut the link, too."""
    try:
        with Network():
            pass
    except Unavailable as reason:
        pytest.skip(str(reason))
    campaign = Campaign(seed=0, events=0, ranks=ranks, arena=arena, script=script)
    campaign.run()
    assert not [outcome for outcome in campaign.outcomes if outcome.missed]
    assert len(campaign.outcomes) == len(script)


def test_every_host_has_another_number_of_slots_in_each_full_offer():
    """A host with the same number would keep the slots of ranks closed that got a notice."""
    slots, seen = Slots(), [1, 1]
    for opens in random.Random(3).choices([True, False], k=100):
        number = slots.offer("a", 2, opens)
        assert number not in seen[-2:] if opens else number == 2
        seen.append(number)
    assert max(seen) == 4


def test_the_script():
    command = [ROOT / "scripts" / "faults", "--help"]
    environment = {**os.environ, "VENV": sys.prefix}
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert "--seed" in shown.stdout


@pytest.mark.parametrize("model", ["numpy", "sharded"])
def test_the_result_is_that_of_an_undisturbed_training(model):
    """The long form: scripts/faults --samples batches --model torch --events 20."""
    if model == "sharded":
        pytest.importorskip("torch")
    campaign = Campaign(seed=8, events=2, ranks=3, samples="batches", model=model)
    campaign.run()
    assert len(campaign.outcomes) == 2
    assert campaign.difference < 1e-9
