"""The barrier in shared memory, between threads: where each has a core, and where they share one."""

import os
import threading

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, HorovodInternalError
from collectives.backends.shm import barrier
from collectives.backends.shm.barrier import (
    CROWDED_LOOKS,
    CROWDED_SPINS,
    BarrierDisagreement,
    ShmBarrier,
    barrier_bytes,
)
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.engine.job import outcome, until

TIMEOUT = 20.0
FOREVER = 1000.0
PAUSE_SECONDS = 0.2
HOST = {}


@pytest.fixture(autouse=True, params=[False, True], ids=["cores", "crowded"])
def crowded(request, monkeypatch):
    """Whether there are more ranks than cores, for all barriers of a test."""
    monkeypatch.setitem(HOST, "crowded", request.param)
    return request.param


def barriers(size, timeout=TIMEOUT, epoch=0):
    memory = np.zeros(barrier_bytes(size), np.uint8)
    memory.view(np.uint32)[: size * 16 : 16] = epoch
    made = [ShmBarrier(memory, group_of(size, rank), timeout, **HOST) for rank in range(size)]
    for member in made:
        member._epoch = epoch
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("epoch", [0, 0x7FFFFFF0, 0xFFFFFFF0])
def test_nobody_crosses_before_all_have_come(size, epoch):
    """The epochs wrap around after 4 billion crossings."""

    def body(rank):
        for step in range(40):
            come[rank] = step
            members[rank].cross()
            assert min(come) >= step
            members[rank].cross()

    come, members = [-1] * size, barriers(size, epoch=epoch)
    in_threads(size, body)
    for member in members:
        member.close()


def test_what_was_written_before_is_seen_after():
    """With work between the two halves of a crossing."""

    def body(rank):
        for step in range(50):
            board[rank] = step
            members[rank].arrive()
            own = board[rank]
            members[rank].wait()
            assert (own, board.tolist()) == (step, [step] * 3)
            members[rank].cross()

    board, members = np.zeros(3), barriers(3)
    in_threads(3, body)


def test_a_gate_that_was_aborted_stays_shut_for_its_owner_only():
    first, second = barriers(2, timeout=0.1)
    error = HorovodInternalError("told to stop")
    first.abort(error)
    first.abort(HorovodInternalError("too late"))
    for _ in range(2):
        assert outcome(first.cross) is error
    for _ in range(2):
        assert outcome(second.cross) is None
    assert isinstance(outcome(second.cross), CollectiveTimeoutError)


def sleeping(barrier):
    return barrier._flags[barrier._rank]


def wait_until(condition):
    while not condition():
        threading.Event().wait(0.001)


@pytest.fixture
def only_woken(monkeypatch):
    """Nobody wakes by himself."""
    monkeypatch.setattr(barrier, "SLEEP_SECONDS", FOREVER)
    monkeypatch.setattr(barrier, "SLICE_SECONDS", FOREVER)


@pytest.mark.usefixtures("only_woken")
def test_the_last_to_come_wakes_all():
    """Ranks that arrive before the last one wake nobody, though others sleep."""

    def body(rank):
        for step in range(20):
            if rank == 3:
                wait_until(lambda: sum(map(sleeping, members)) == 3)
                rung.append(members[0]._words[members[0]._wake_word])
            elif rank == 2:
                wait_until(lambda: sum(map(sleeping, members[:2])) == 2)
            members[rank].cross()
            come[rank] = step
            members[rank].cross()
            assert min(come) == step

    come, rung, members = [-1] * 4, [], barriers(4, FOREVER)
    in_threads(4, body)
    assert rung[0] == 0  # nobody has rung before the last of the first crossing came


@pytest.mark.usefixtures("only_woken")
def test_who_comes_right_after_the_last_look_before_the_sleep_is_not_missed(monkeypatch):
    def look():
        looks.append(all_arrived())
        if len(looks) == 1:
            members[1].arrive()
        return looks[-1]

    looks, members = [], barriers(2, FOREVER)
    all_arrived = members[0]._all_arrived
    monkeypatch.setattr(members[0], "_all_arrived", look)
    in_threads(1, lambda _: members[0].cross())
    assert looks[0] is False


def test_who_comes_right_after_the_time_is_up_has_come(monkeypatch):
    def sleep(timeout, is_over):
        members[1].arrive()
        return False

    members = barriers(2, 0.2)
    monkeypatch.setattr(members[0], "_sleep", sleep)
    members[0].cross()


@pytest.mark.usefixtures("only_woken")
@pytest.mark.parametrize("value", [0, 7])
def test_a_race_to_the_gate_loses_no_wake_up(value):
    def body(rank):
        for _ in range(2000):
            if value:
                members[rank].ask(value, lambda absent: None, agreed=lambda: None)
            members[rank].cross()

    members = barriers(3, FOREVER)
    for member in members:
        member._spins = 1
    in_threads(3, body)


@pytest.mark.usefixtures("only_woken")
@pytest.mark.parametrize("other", [0, 8])
def test_who_sleeps_hears_at_once_that_another_has_a_different_value(other):
    """Without waiting for the third rank, which never comes."""

    def body(rank):
        if rank == 0:
            members[0].ask(7, lambda absent: None, agreed=lambda: None)
            return type(outcome(members[0].cross))
        wait_until(lambda: sleeping(members[0]))
        if other:
            members[1].ask(other, lambda absent: None, agreed=lambda: None)
        return members[1].arrive()

    members = barriers(3, FOREVER)
    assert in_threads(2, body) == [BarrierDisagreement, None]


def test_a_rank_that_goes_on_while_it_is_looked_at_does_not_differ():
    class GoingOn:
        """Each look at the other rank finds it at the next crossing; it came to the first with a 7."""

        def __init__(self):
            self.looks = iter([7 << 32 | 1, 2, 3, 4])

        def __getitem__(self, index):
            return 7 << 32 | 1 if index == members[0]._mine else next(self.looks)

    members = barriers(2)
    members[0]._words = GoingOn()
    assert not members[0]._is_differing()


def test_who_asks_is_told_who_is_missing():
    def waiting(absent):
        told.append(absent)
        members[len(told)].ask(7, lambda absent: None, agreed=lambda: None)
        members[len(told)].arrive()

    told, members = [], barriers(3)
    members[0].ask(7, waiting, lambda: told.append("agreed"))
    members[0].cross()
    assert told == [[1, 2], [2], "agreed"]


def test_an_abort_wakes_who_sleeps(monkeypatch):
    monkeypatch.setattr(barrier, "SLEEP_SECONDS", FOREVER)

    def body(rank):
        if rank == 0:
            return outcome(members[0].cross)
        wait_until(lambda: sleeping(members[0]))
        while sleeping(members[0]):
            members[0].abort(error)
        return None

    error, members = HorovodInternalError("told to stop"), barriers(2, FOREVER)
    assert in_threads(2, body)[0] is error


@pytest.mark.parametrize(("place", "yields"), [(5, CROWDED_LOOKS), (6, CROWDED_SPINS)])
def test_who_shares_a_core_with_an_absent_rank_does_not_keep_it(place, yields, crowded, monkeypatch):
    """Of three ranks one is here; the other two were on ``place`` and 6 when they came the last time."""

    class Slept(Exception):
        pass

    def sleep(*_):
        raise Slept

    if not crowded:
        pytest.skip("with a core for each nobody is in the way")
    members, count = barriers(3), []
    for member, core in zip(members, (5, place, 6), strict=True):
        monkeypatch.setattr(barrier, "_core", lambda core=core: core)
        member.arrive()
    members[0].wait()
    monkeypatch.setattr(barrier, "_core", lambda: 5)
    monkeypatch.setattr(os, "sched_yield", lambda: count.append(1))
    monkeypatch.setattr(barrier, "wait", sleep)
    assert isinstance(outcome(members[0].cross), Slept)
    assert sum(count) == yields


def test_waits_are_told_apart_until_all_have_begun_and_after():
    """Rank 1 comes late to the first crossing; rank 0 comes late to the second one."""

    def come_late(other, crossing):
        until(lambda: other._epoch == crossing)
        pause.wait(PAUSE_SECONDS)

    def body(rank):
        for crossing, late in enumerate((1, 0), 1):
            if rank == late:
                come_late(members[1 - late], crossing)
            members[rank].cross()
        first = members[rank].waited()
        return first, members[rank].waited()

    pause, members = threading.Event(), barriers(2)
    (early, nothing), (late, _) = in_threads(2, body)
    assert early[0] > PAUSE_SECONDS / 2 > early[1]
    assert late[1] > PAUSE_SECONDS / 2 > late[0]
    assert nothing == (0.0, 0.0)
    for member in members:
        member.close()


def test_a_crossing_that_asks_is_the_first_of_an_operation():
    """As after a trial that did not run."""
    members = barriers(1)
    members[0].cross()
    assert not members[0]._is_first
    members[0].ask(1, lambda absent: None, lambda: None)
    assert members[0]._is_first
    members[0].cross()
    members[0].close()
