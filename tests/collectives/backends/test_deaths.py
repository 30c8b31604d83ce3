"""A death is noticed in shared memory, without any connection."""

import functools
import mmap
import queue
import threading
import time

import numpy as np
import pytest

from collectives.backends.shm import deaths
from collectives.backends.shm.deaths import DeathWatch, deaths_bytes
from tests.collectives.backends.members import Processes
from tests.collectives.engine.job import PATIENCE


def memory_of(path, size):
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), deaths_bytes(size)), np.uint8)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "memory").write_bytes(bytes(4096))
    return tmp_path / "memory"


def _watch(path, expected, leaver, member):
    """Tell that this member watches, then the deaths; the ``leaver`` leaves in order."""
    found = queue.SimpleQueue()
    watch = DeathWatch(memory_of(path, member.size), member.rank, found.put)
    _until_watched(path, member)
    member.tell("watching")
    if member.rank == leaver:
        watch.close()
        return "left"
    deaths = {found.get(timeout=PATIENCE) for _ in range(expected)}
    watch.close()
    return deaths, found.empty()


def _until_watched(path, member):
    words = memory_of(path, member.size).view(np.uint32)
    deadline = time.monotonic() + PATIENCE
    while not words.all() and time.monotonic() < deadline:
        time.sleep(0.01)


def until_all_watch(processes, size):
    for rank in range(size):
        assert processes.hear(rank) == "watching"


@pytest.mark.parametrize("victims", [{1}, {1, 2}])
def test_all_survivors_notice_the_deaths(path, victims):
    with Processes(4, functools.partial(_watch, path, len(victims), None)) as processes:
        until_all_watch(processes, 4)
        for victim in victims:
            processes.kill(victim)
        for rank in {0, 1, 2, 3} - victims:
            assert processes.hear(rank, PATIENCE) == (victims, True)


def test_a_member_that_leaves_is_not_dead(path):
    """It ends before the other one is killed."""
    with Processes(3, functools.partial(_watch, path, 1, 1)) as processes:
        until_all_watch(processes, 3)
        assert processes.hear(1, PATIENCE) == "left"
        processes.kill(2)
        assert processes.hear(0, PATIENCE) == ({2}, True)


def test_a_death_before_the_watch_begins(path):
    dead = memory_of(path, 2)
    dead.view(np.uint32)[1] = deaths.DIED | deaths.WAITERS
    found = queue.SimpleQueue()
    watch = DeathWatch(dead, 0, found.put)
    assert found.get(timeout=PATIENCE) == 1
    watch.close()


@pytest.mark.parametrize("number", [None, -1])
def test_without_robust_lists_nothing_is_noticed(path, monkeypatch, number):
    monkeypatch.setattr(deaths, "_NUMBER", number)
    memory = memory_of(path, 2)
    watch = DeathWatch(memory, 0, lambda position: None)
    watch.close()
    watch.close()
    assert list(memory.view(np.uint32)) == [deaths.LEFT, 0]


def test_a_close_ends_the_thread_at_any_moment(path):
    """Also while it falls asleep."""
    before = set(threading.enumerate())
    for _ in range(200):
        memory = memory_of(path, 2)
        watches = [DeathWatch(memory, position, lambda position: None) for position in (0, 1)]
        for watch in watches:
            watch.close()
        assert list(memory.view(np.uint32)) == [deaths.LEFT] * 2
    assert not set(threading.enumerate()) - before
