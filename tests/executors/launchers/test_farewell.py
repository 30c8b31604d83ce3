"""The end of what rank 0 serves after a rendezvous that failed."""

import threading

import pytest

from executors.launchers import place
from executors.launchers.place import Farewell

SECONDS = 60.0


@pytest.fixture
def held():
    """A farewell, and the calls that it makes."""
    one, calls = Farewell(), []
    one.hold(lambda: calls.append("close"), lambda: calls.append("disown"))
    yield one, calls
    one.end()


def test_it_ends_by_itself(monkeypatch):
    monkeypatch.setattr(place, "SECONDS", 0.01)
    closed = threading.Event()
    Farewell().hold(closed.set, closed.set)
    assert closed.wait(SECONDS)


def test_it_ends_once(held):
    one, calls = held
    one.end()
    one.end()
    assert calls == ["close"]


def test_a_forked_child_leaves_it_to_the_parent(held):
    one, calls = held
    one._forget()  # no fork here: the thread of the parent is no part of a child
    one.disown()
    one.end()
    assert calls == ["disown"]
