"""How many cores there are, when they are scarce, and when they are crowded."""

import os
import sys

import pytest

from collectives import cores
from collectives.api import Topology
from collectives.backends import registry
from collectives.cores import Cores, usable_cores, usable_numbers
from collectives.handshake.hello import Hello
from collectives.settings import Settings


@pytest.mark.parametrize(
    ("count", "ranks", "crowded", "scarce"),
    [(1, 1, False, True), (2, 1, False, False), (2, 2, False, True), (2, 3, True, True), (8, 4, False, False)],
)
def test_crowded_and_scarce(count, ranks, crowded, scarce):
    shared = Cores(count, ranks)
    assert (shared.are_crowded, shared.are_scarce) == (crowded, scarce)


@pytest.mark.parametrize(("cores", "crowded"), [(2, False), (1, True)])
def test_the_gate_is_given_the_cores_of_the_host(cores, crowded, monkeypatch):
    """Not those of its own process: each of two ranks may be bound to a core of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0} if cores == 2 else {0, 1})
    topology = Topology(0, 2, 0, 2, hosts=("a", "a"), cores=cores)
    made = []

    def make(group, timeout, crowded):
        made.append(crowded)
        return None

    monkeypatch.setattr("collectives.backends.shm.ShmBootstrap", make)
    registry.prepare([0, 1], topology, Settings(cpu_operations="shm"), "127.0.0.1")
    assert made == [crowded]


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, sys.maxsize),
        ({"": "max 100000\n"}, sys.maxsize),
        ({"": "150000 100000\n"}, 2),
        ({"a/b": "max 100000", "a": "300000 100000"}, 3),
        ({"a/b": "1000 100000", "a": "300000 100000"}, 1),
    ],
)
def test_the_quota_of_a_control_group(tmp_path, limits, count):
    for group, text in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(text)
    membership = tmp_path / "membership"
    membership.write_text("1:cpu:/elsewhere\n0::/a/b\n")
    assert cores.quota_of(tmp_path, membership) == count


def test_a_quota_is_less_than_the_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cores, "_quota", lambda: 3)
    assert usable_cores() == 3
    assert usable_numbers() == (0, 1, 2)
    assert Hello(0, 1, "node").cores == (0, 1, 2)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "count"), [("-1", sys.maxsize), ("150000", 2)])
@pytest.mark.parametrize("group", ["a/b", "a", ""])
def test_the_quota_of_a_control_group_of_version_1(tmp_path, mount, quota, count, group):
    """In a container the path may be that of the host, and the quota that of the root."""
    place = tmp_path / mount / group
    place.mkdir(parents=True)
    (place / "cpu.cfs_quota_us").write_text(quota + "\n")
    (place / "cpu.cfs_period_us").write_text("100000\n")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/a/b\n3:cpu,cpuacct:/a/b\n")
    assert cores.quota_of(tmp_path, membership) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90000 1500000000 7\n", 1.5), ("0 0 0\n", 0.0), ("", 0.0), ("90000\n", 0.0), ("- - -\n", 0.0)],
)
def test_the_wait_for_a_core_is_in_the_schedule_of_the_main_thread(tmp_path, text, seconds):
    (tmp_path / "schedstat").write_text(text)
    assert cores.queued_seconds_of(tmp_path / "schedstat") == seconds


def test_a_system_without_a_schedule_tells_of_no_wait(tmp_path):
    assert cores.queued_seconds_of(tmp_path / "schedstat") == 0.0


def test_the_wait_of_this_process_never_falls():
    before = cores.queued_seconds()
    assert 0.0 <= before <= cores.queued_seconds()
