"""The numbers of optimizers side by side."""

import gc

import pytest

from hvd_cluster import basics
from hvd_cluster.optimizer.ordinals import Ordinals


class Optimizer:
    def __init__(self, names, process_set="all"):
        self.names_in_flight = lambda: set(names)
        self.process_set_in_flight = lambda: process_set


class World:
    """Stands for an engine."""


@pytest.fixture
def worlds(monkeypatch):
    current = [World()]
    monkeypatch.setattr(basics, "engine", lambda: current[0])
    return current


def made(ordinals, *names, **options):
    optimizer = Optimizer(names, **options)
    ordinals.add(optimizer)
    ordinals.get(optimizer)
    return optimizer


def test_rivals_have_different_numbers(worlds):
    ordinals = Ordinals()
    optimizers = [made(ordinals, *names) for names in ("a", "b", "ab", "b", "c")]
    assert [ordinals.get(each) for each in optimizers] == [0, 0, 1, 2, 0]
    assert ordinals.get(made(ordinals, "a", process_set="some")) == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_a_replaced_optimizer_counts_on_all_ranks(worlds, keeps):
    ordinals = Ordinals()
    kept = made(ordinals, "a")
    if not keeps:
        del kept
    gc.collect()
    assert len(ordinals.all()) == keeps
    assert ordinals.get(made(ordinals, "a")) == 1


def test_a_new_world_counts_those_in_use(worlds):
    ordinals = Ordinals()
    first, second = made(ordinals, "a"), made(ordinals, "a")
    assert (ordinals.get(first), ordinals.get(second)) == (0, 1)
    del first
    worlds[0] = World()
    assert ordinals.get(second) == 0
    assert ordinals.get(made(ordinals, "a")) == 1


def test_a_copy_counts_from_its_first_use_on(worlds):
    ordinals = Ordinals()
    first, copy = made(ordinals, "a"), Optimizer("a")
    ordinals.add(copy)
    assert ordinals.get(made(ordinals, "a")) == 1
    assert (ordinals.get(copy), ordinals.get(first)) == (2, 0)
