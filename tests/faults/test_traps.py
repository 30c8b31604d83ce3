"""Traps at the named points of a world."""

import functools
import importlib
import json
import os
import resource
import time
from types import SimpleNamespace

import pytest

from tests.faults import points
from tests.faults.jobs import traps
from tests.faults.jobs.traps import InjectedError, Traps, install, place, remove

POINT = "before the sync"


@pytest.fixture
def laid(tmp_path):
    """Lays a trap."""
    (tmp_path / traps.FOLDER).mkdir()

    def lay(kind, number=0, spared=(), shift=0.0, point=POINT):
        place(tmp_path, point, number, {"kind": kind, "spared": [*spared], "shift": shift})

    return lay


def passing(folder, name="worker-0"):
    return Traps(folder, name, lambda: 4)


@pytest.mark.parametrize("name", [*points.OF_RANKS, *points.OF_DRIVERS])
def test_a_point_is_a_function_of_the_product_or_of_the_training(name):
    module, _, attribute = {**points.OF_RANKS, **points.OF_DRIVERS}[name].place.partition(":")
    found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    assert callable(found)


def test_the_moments_of_points():
    assert points.moment_of("before the sync") == points.moment_of("after the connection") == points.CHANGE
    assert points.moment_of("after the next world") == points.LOSS
    assert points.is_of_driver("after the publication")
    assert not points.is_of_driver("after the sync")
    assert "after the vote" in points.names(points.OF_RANKS, points.STEP, points.END)


def test_a_trap_hits_once_and_tells_who_was_hit(tmp_path, laid):
    laid("error")
    passed = passing(tmp_path)
    passed.pass_by("before the vote")
    with pytest.raises(InjectedError, match="a trap of the campaign: error"):
        passed.pass_by(POINT)
    passed.pass_by(POINT)
    note = json.loads((tmp_path / "worker-0").read_text())
    assert (note["hit"], note["point"], note["round"], note["pid"]) == ("error", POINT, 4, os.getpid())
    assert remove(tmp_path) == 0


def test_a_trap_spares_a_process_and_waits_for_another_one(tmp_path, laid):
    laid("memory", spared=["worker-0"])
    passing(tmp_path).pass_by(POINT)
    with pytest.raises(MemoryError):
        passing(tmp_path, "worker-1").pass_by(POINT)


def test_two_traps_hit_two_processes(tmp_path, laid):
    for number in range(2):
        laid("memory", number)
    for name in ("worker-0", "worker-1"):
        with pytest.raises(MemoryError):
            passing(tmp_path, name).pass_by(POINT)
    passing(tmp_path, "worker-2").pass_by(POINT)


def test_a_trap_that_is_removed_hits_nobody(tmp_path, laid):
    laid("error")
    assert remove(tmp_path) == 1
    passing(tmp_path).pass_by(POINT)


def test_a_process_without_descriptors_passes_by(tmp_path, laid):
    laid("error")
    passed, limits = passing(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        passed.pass_by(POINT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_clock_steps_and_the_monotonic_one_does_not(tmp_path, laid, monkeypatch):
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))
    laid("clock", shift=-3600.0)
    before, monotonic = time.time(), time.monotonic()
    passing(tmp_path).pass_by(POINT)
    assert time.time() < before - 1800
    assert time.time_ns() < (before - 1800) * 1e9
    assert time.monotonic() >= monotonic


class Product:
    """What a point is before and after."""

    def __init__(self):
        self.calls = []

    def act(self):
        self.calls.append("act")
        raise KeyError


def test_a_process_passes_by_before_and_after_a_function_also_when_that_raises(monkeypatch):
    product = Product()
    monkeypatch.setattr(Product, "act", Product.act)
    install(SimpleNamespace(pass_by=product.calls.append), {"the act": points.Point(f"{__name__}:Product.act", "step")})
    with pytest.raises(KeyError):
        product.act()
    assert product.calls == ["before the act", "act", "after the act"]
