"""The exception that ends the main thread of a process in an elastic job."""

import os
import sys
from types import SimpleNamespace

import pytest

from collectives.api import PeerLostError
from hvd_cluster.elastic.notice import tell_of_uncaught


@pytest.fixture
def told(monkeypatch):
    """What is done when an exception is not caught, in order."""
    done = []
    worlds = SimpleNamespace(tell_exception=lambda text, is_uncaught: done.append((text, is_uncaught)))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: done.append("shown"))
    for _ in range(2):
        tell_of_uncaught(worlds)
    return done


def end_by(error):
    sys.excepthook(type(error), error, None)


def test_the_driver_hears_of_it_once_when_it_has_been_shown(told):
    end_by(ValueError("bad batch"))
    assert told == ["shown", ("ValueError: bad batch", True)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLostError("rank 1 is gone")])
def test_what_is_no_exception_of_the_user_is_only_shown(told, error):
    end_by(error)
    assert told == ["shown"]


def test_a_forked_child_tells_nothing(told, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    end_by(ValueError("bad batch"))
    assert told == ["shown"]
