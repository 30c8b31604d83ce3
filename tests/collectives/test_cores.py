"""When cores are scarce, and when they are crowded."""

import os

import pytest

from collectives.api import Topology
from collectives.backends import table
from collectives.cores import Cores
from collectives.settings import Settings


@pytest.mark.parametrize(
    ("count", "ranks", "crowded", "scarce"),
    [(1, 1, False, True), (2, 1, False, False), (2, 2, False, True), (2, 3, True, True), (8, 4, False, False)],
)
def test_crowded_and_scarce(count, ranks, crowded, scarce):
    cores = Cores(count, ranks)
    assert (cores.are_crowded, cores.are_scarce) == (crowded, scarce)


@pytest.mark.parametrize(("cores", "crowded"), [(2, False), (1, True)])
def test_the_gate_is_given_the_cores_of_the_host(cores, crowded, monkeypatch):
    """Not those of its own process: each of two ranks may be bound to a core of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0} if cores == 2 else {0, 1})
    topology = Topology(0, 2, 0, 2, hosts=("a", "a"), cores=cores)
    made = []

    def make(group, timeout, crowded):
        made.append(crowded)
        return None

    monkeypatch.setattr("collectives.backends.shm.ShmJoining", make)
    table.prepare([0, 1], topology, Settings(cpu_operations="shm"), "127.0.0.1")
    assert made == [crowded]
