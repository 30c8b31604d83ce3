"""The draw of events."""

import random
from dataclasses import replace

import pytest

from tests.faults import points
from tests.faults.events import (
    CLOCK_SECONDS,
    DRIVERS,
    ENDS,
    EXECUTORS,
    LONG_SECONDS,
    NODE_SECONDS,
    NODES,
    PROCESSES,
    STOP_SECONDS,
    TWO_HOSTS,
    Ambush,
    Blow,
    draw,
    draw_end,
)


def blows_of(count, size, most, repertoire=PROCESSES, remote=()):
    """Those of each event without an ambush."""
    drawn = [draw(random.Random(seed), size, most, repertoire, remote) for seed in range(count)]
    return [parts for parts in drawn if all(isinstance(part, Blow) for part in parts)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_rank_is_always_left_alone(size):
    for blows in blows_of(300, size, 4):
        assert len({rank for blow in blows for rank in blow.removes}) < max(size, 2)
        assert all(blow.target < size for blow in blows if blow.removes)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_ambush_spares_a_rank_that_nothing_else_hits(size):
    hits = 0
    for seed in range(1000):
        *blows, last = draw(random.Random(seed), size, 4)
        if isinstance(last, Ambush) and last.kind != "error":
            hit = {rank for blow in blows for rank in blow.removes}
            assert last.spared not in hit
            assert len(hit) + last.count < size
            hits += 1
    assert hits > 50


@pytest.mark.parametrize(("repertoire", "kinds"), [(TWO_HOSTS, {"agent", "cut", "slow"}), (NODES, {"node", "drain"})])
def test_a_host_is_lost_with_all_its_ranks_and_never_with_all_of_the_job(repertoire, kinds):
    def hosts(remote):
        drawn = blows_of(600, 3, 3, repertoire, remote)
        return [each for blows in drawn for each in blows if each.beside or each.kind in kinds - {"drain", "slow"}]

    assert {blow.kind for blow in hosts((0, 2))} == kinds
    assert {blow.removes for blow in hosts((0, 2)) if blow.is_lasting and blow.kind != "slow"} == {(0, 2)}
    assert not hosts(())
    assert not hosts((0, 1, 2))


@pytest.mark.parametrize("repertoire", [NODES, EXECUTORS])
def test_clusters_are_offered_nothing(repertoire):
    kinds = {blow.kind for blows in blows_of(600, 3, 3, repertoire) for blow in blows}
    assert kinds == {*repertoire.hits, *repertoire.drivers, "stop", "newcomer", "halt", "all"}


@pytest.mark.parametrize(("repertoire", "remote"), [(NODES, (0, 2)), (EXECUTORS, ())])
def test_a_cluster_takes_what_drains_in_the_end(repertoire, remote):
    drawn = blows_of(300, 3, 3, repertoire, remote)
    notices = [blow for blows in drawn for blow in blows if blow.kind == "drain"]
    assert {blow.seconds for blow in notices} == {NODE_SECONDS}
    assert all(set(blow.removes) >= {blow.target} for blow in notices)


def test_a_driver_that_shall_live():
    repertoire = replace(EXECUTORS, drivers=())
    drawn = blows_of(300, 3, 3, repertoire)
    assert not {blow.kind for blows in drawn for blow in blows} & DRIVERS


def test_all_kinds_come_and_a_seed_repeats_them():
    kinds = {blow.kind for blows in blows_of(600, 3, 3) for blow in blows}
    hindrances = {"exhaust", "starve"}
    assert kinds == {
        "kill",
        "guard",
        "stop",
        "drain",
        "newcomer",
        "offer",
        "flap",
        "halt",
        "driver",
        "all",
        *hindrances,
    }
    assert blows_of(600, 3, 3) == blows_of(600, 3, 3)


@pytest.mark.parametrize("repertoire", [PROCESSES, NODES])
def test_each_kind_comes_at_each_point(repertoire):
    drawn = [part for seed in range(20000) for part in draw(random.Random(seed), 4, 4, repertoire)]
    ambushes = [part for part in drawn if isinstance(part, Ambush)]
    wanted = points.names(points.OF_RANKS, points.STEP, points.LOSS, points.CHANGE, points.GROW)
    assert not any(part.late for part in ambushes if points.moment_of(part.point) == points.LOSS)
    assert {(part.kind, part.point) for part in ambushes if not part.is_of_driver and part.kind != "error"} >= {
        (kind, point) for kind in repertoire.ambushes for point in wanted
    }
    of_driver = points.names(points.OF_DRIVERS, points.LOSS, points.CHANGE, points.GROW)
    assert {part.point for part in ambushes if part.is_of_driver} == {*of_driver}
    assert {part.kind for part in ambushes if part.is_of_driver} == {"kill", "stop", "clock", "memory"}
    assert all(part.late for part in ambushes if points.moment_of(part.point) == points.GROW)
    assert {part.seconds for part in ambushes if part.kind == "clock"} == {*CLOCK_SECONDS}
    assert {part.count for part in ambushes} == {1, 2}


def test_what_happens_at_the_end_of_a_job():
    drawn = [draw_end(random.Random(seed), 3, PROCESSES) for seed in range(600)]
    assert None in drawn
    wanted = points.names(points.OF_RANKS, points.END) + points.names(points.OF_DRIVERS, points.END)
    assert {ambush.point for ambush in drawn if ambush} == {*wanted}


def test_stops_take_from_one_to_twenty_seconds():
    drawn = [blow.seconds for blows in blows_of(2000, 3, 3) for blow in blows if blow.kind == "stop"]
    assert {*drawn} == {*STOP_SECONDS}
    assert (min(drawn), max(drawn)) == (1.0, 20.0)


@pytest.mark.parametrize(
    ("repertoire", "kinds"), [(PROCESSES, {"exhaust", "starve"}), (TWO_HOSTS, {"exhaust", "starve", "slow"})]
)
def test_what_hinders_the_recovery_from_a_loss_hits_another_rank_and_has_an_end(repertoire, kinds):
    drawn = blows_of(600, 3, 3, repertoire, (1,))
    hindered = [blows for blows in drawn if blows[0].kind in {"exhaust", "starve", "slow"} and len(blows) == 2]
    assert {first.kind for first, _ in hindered} == kinds
    assert all(first.seconds > 0 and first.kind in ENDS for first, _ in hindered)
    assert all(second.kind == "kill" and second.target != first.target for first, second in hindered)


def test_what_an_event_says():
    assert str(Blow("exhaust", 2, seconds=0.5)) == "exhaust rank 2 for 0.5 s"
    assert str(Blow("stop", 2, seconds=LONG_SECONDS)) == "stop rank 2 for 10 s"
    assert str(Blow("kill", 1, 0.25)) == "kill rank 1 after 0.25 s"
    assert str(Blow("offer", 3)) == "offer 3 slots"
    assert str(Blow("cut", 0, seconds=8.0, beside=(2,))) == "cut rank 0, 2 for 8 s"
    assert str(Blow("newcomer")) == "kill the newcomer"
    assert str(Blow("all")) == "kill all ranks"
    assert str(Blow("halt", seconds=2.0)) == "halt for 2 s"
    assert str(Ambush("stop", "before the sync", 1, 2.0)) == "stop before the sync for 2 s"
    assert str(Ambush("kill", "after the vote", count=2)) == "kill after the vote 2 times"
    assert str(Blow("JVM")) == "kill the JVM"
    assert str(Blow("drain", 1, 0.25, NODE_SECONDS)) == "drain rank 1 for 3 s after 0.25 s"
