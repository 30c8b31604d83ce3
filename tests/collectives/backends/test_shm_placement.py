"""Ranks that share a core although another core has fewer: the rank that moves, and its new core."""

import os
import time

import numpy as np
import pytest

from collectives.backends.placement import FRESH_SECONDS, MOVE_SECONDS, Placement, better_core
from collectives.backends.shm import barrier
from collectives.backends.shm.barrier import ShmBarrier, barrier_bytes
from tests.collectives.backends.members import group_of, in_threads


@pytest.mark.parametrize(
    ("here", "others", "allowed", "better"),
    [
        (0, [0], {0, 1}, 1),
        (0, [1], {0, 1}, None),
        (1, [1], {0, 1}, 0),
        (0, [0], {0}, None),
        (0, [0, 0, 0], {0, 1}, 1),
        (0, [0, 0, 1], {0, 1}, 1),
        (0, [0, 1, 1], {0, 1}, None),
        (0, [0, 1], {0, 1}, None),
        (2, [2], {0, 1, 2, 3}, 3),
        (3, [3], {0, 1, 2, 3}, 0),
        (2, [2, 3], {0, 1, 2, 3}, 0),
        (2, [2, 7], {2, 3}, 3),
        (5, [5], {0, 1}, None),  # the kernel is about to move it
    ],
)
def test_a_rank_moves_to_the_next_core_that_has_fewer_ranks(here, others, allowed, better):
    assert better_core(here, others, allowed) == better


class Threads:
    """The affinity of the calling thread, and the core that it runs on."""

    def __init__(self, monkeypatch, allowed, core):
        self.allowed, self.core, self.now, self.bound = allowed, core, 100.0, []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: self.allowed)
        monkeypatch.setattr(os, "sched_setaffinity", self._bind)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(barrier, "_core", lambda: self.core)

    def _bind(self, thread, cores):
        assert thread == 0
        if cores - self.allowed:
            raise OSError("the system refuses these cores")
        self.bound.append(cores)
        if self.core not in cores:
            [self.core] = cores


def shared_before(crossing=1):
    """A rank that shared its core at this crossing already."""
    placement = Placement()
    assert not placement.improve(0, [0], crossing)
    return placement


def test_a_thread_is_moved_and_not_bound(monkeypatch):
    threads = Threads(monkeypatch, {0, 1, 2}, 0)
    assert shared_before().improve(0, [0, 1], 2)
    assert (threads.core, threads.bound) == (2, [{2}, {0, 1, 2}])


def test_a_thread_does_not_move_again_at_once(monkeypatch):
    threads = Threads(monkeypatch, {0, 1}, 0)
    placement = shared_before()
    assert placement.improve(0, [0], 2)
    assert not placement.improve(1, [1], 3)
    threads.now += MOVE_SECONDS
    assert placement.improve(1, [1], 4)


def test_a_thread_does_not_move_where_the_last_crossing_was_long_ago(monkeypatch):
    threads = Threads(monkeypatch, {0, 1}, 0)
    placement = shared_before()
    assert not placement.improve(0, [0], 1)
    threads.now += 2 * FRESH_SECONDS
    assert not placement.improve(0, [0], 2)
    assert threads.bound == []
    assert placement.improve(0, [0], 3)


def test_a_core_that_is_taken_away_does_no_harm(monkeypatch):
    threads = Threads(monkeypatch, {0, 1}, 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert shared_before().improve(0, [0, 1], 2)
    assert threads.bound == []


def test_a_rank_that_waits_for_one_on_its_core_moves(monkeypatch):
    """Both ranks were last seen on core 0; the one that waits moves at its second crossing."""
    threads = Threads(monkeypatch, {0, 1}, 0)
    memory = np.zeros(barrier_bytes(2), np.uint8)
    first, second = (ShmBarrier(memory, group_of(2, rank), 20.0, crowded=False) for rank in range(2))
    for bound in ([], [{1}, {0, 1}]):
        first.arrive()
        assert not first._arrive_soon()
        assert threads.bound == bound
        core, threads.core = threads.core, 0
        second.arrive()
        threads.core = core
        first.wait()
    assert threads.core == 1
    first.close()
    second.close()


def test_ranks_really_move():
    """Threads of this process that begin on one core; the affinity is as before at the end."""
    allowed = os.sched_getaffinity(0)

    def body(rank):
        os.sched_setaffinity(0, {min(allowed)})
        os.sched_setaffinity(0, allowed)
        for _ in range(20):
            members[rank].cross()
        return os.sched_getaffinity(0)

    memory = np.zeros(barrier_bytes(3), np.uint8)
    members = [ShmBarrier(memory, group_of(3, rank), 20.0, crowded=True) for rank in range(3)]
    assert in_threads(3, body) == [allowed] * 3
    for member in members:
        member.close()
