"""The draw of events."""

import random
from dataclasses import replace

import pytest

from tests.faults.events import (
    DRIVERS,
    ENDS,
    EXECUTORS,
    LONG_SECONDS,
    NODE_SECONDS,
    NODES,
    PROCESSES,
    TWO_HOSTS,
    Blow,
    draw,
)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_rank_is_always_left_alone(size):
    for seed in range(300):
        blows = draw(random.Random(seed), size, 4)
        assert len({blow.target for blow in blows if blow.kind not in {"offer", "newcomer", "driver"}}) < max(size, 2)
        assert all(blow.target < size for blow in blows if blow.removes)


@pytest.mark.parametrize(("repertoire", "kinds"), [(TWO_HOSTS, {"agent", "cut"}), (NODES, {"node", "drain"})])
def test_a_host_is_lost_with_all_its_ranks_and_never_with_all_of_the_job(repertoire, kinds):
    def hosts(remote):
        drawn = [draw(random.Random(seed), 3, 3, repertoire, remote) for seed in range(300)]
        return [blow for blows in drawn for blow in blows if blow.beside or blow.kind in kinds - {"drain"}]

    assert {blow.kind for blow in hosts((0, 2))} == kinds
    assert {blow.removes for blow in hosts((0, 2))} == {(0, 2)}
    assert not hosts(())
    assert not hosts((0, 1, 2))


@pytest.mark.parametrize("repertoire", [NODES, EXECUTORS])
def test_clusters_are_offered_nothing(repertoire):
    drawn = [draw(random.Random(seed), 3, 3, repertoire) for seed in range(300)]
    kinds = {blow.kind for blows in drawn for blow in blows}
    assert kinds == {*repertoire.hits, *repertoire.drivers, "stop", "newcomer"}


@pytest.mark.parametrize(("repertoire", "remote"), [(NODES, (0, 2)), (EXECUTORS, ())])
def test_a_cluster_takes_what_drains_in_the_end(repertoire, remote):
    drawn = [draw(random.Random(seed), 3, 3, repertoire, remote) for seed in range(300)]
    notices = [blow for blows in drawn for blow in blows if blow.kind == "drain"]
    assert {blow.seconds for blow in notices} == {NODE_SECONDS}
    assert all(set(blow.removes) >= {blow.target} for blow in notices)


def test_a_driver_that_shall_live():
    repertoire = replace(EXECUTORS, drivers=())
    drawn = [draw(random.Random(seed), 3, 3, repertoire) for seed in range(300)]
    assert not {blow.kind for blows in drawn for blow in blows} & DRIVERS


def test_all_kinds_come_and_a_seed_repeats_them():
    drawn = [draw(random.Random(seed), 3, 3) for seed in range(300)]
    kinds = {blow.kind for blows in drawn for blow in blows}
    assert kinds == {"kill", "guard", "stop", "exhaust", "drain", "newcomer", "offer", "driver"}
    assert drawn == [draw(random.Random(seed), 3, 3) for seed in range(300)]


@pytest.mark.parametrize(("repertoire", "kinds"), [(PROCESSES, {"exhaust"}), (TWO_HOSTS, {"exhaust", "slow"})])
def test_what_hinders_the_recovery_from_a_loss_hits_another_rank_and_has_an_end(repertoire, kinds):
    drawn = [draw(random.Random(seed), 3, 3, repertoire, (1,)) for seed in range(300)]
    hindered = [blows for blows in drawn if blows[0].kind in {"exhaust", "slow"}]
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
    assert str(Blow("JVM")) == "kill the JVM"
    assert str(Blow("drain", 1, 0.25, NODE_SECONDS)) == "drain rank 1 for 3 s after 0.25 s"
