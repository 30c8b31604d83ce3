"""The limits of strangers at a listener, their warnings, and that all servers have these limits."""

import ast
import logging
import math
from pathlib import Path

import pytest

from collectives.net import strangers
from collectives.net.strangers import DEADLINE, PAUSE, SILENCE, RareWarnings, Strangers

ROOT = Path(__file__).parents[3]
SECONDS = strangers.SECONDS


@pytest.fixture
def crowd():
    found = Strangers()
    found.capacity = 2
    return found


def test_one_that_does_not_show_itself_in_time_must_go(crowd):
    crowd.add(7, 100.0)
    assert crowd.next_look(100.0) == 100.0 + DEADLINE
    assert crowd.overdue(100.0 + DEADLINE - 0.1) == []
    assert crowd.overdue(100.0 + DEADLINE) == [7]


def test_one_that_has_shown_itself_stays(crowd):
    crowd.add(7, 100.0)
    crowd.discard(7)
    assert crowd.overdue(100.0 + DEADLINE) == []
    assert crowd.next_look(100.0) == math.inf


def test_silent_ones_must_go_only_where_others_wait(crowd):
    crowd.add(7, 100.0)
    assert crowd.in_the_way(105.0) == []
    crowd.add(8, 105.0)
    assert not crowd.may_accept(105.0)
    assert crowd.in_the_way(105.0) == [7]
    crowd.discard(7)
    assert crowd.may_accept(105.0)


def test_a_full_house_is_looked_at_again_when_the_oldest_was_silent_for_long_enough(crowd):
    crowd.add(7, 100.0)
    crowd.add(8, 100.2)
    assert crowd.next_look(100.2) == 100.0 + SILENCE
    assert crowd.in_the_way(100.0 + SILENCE) == [7]


def test_a_pause(crowd):
    crowd.add(7, 99.0)
    crowd.pause(100.0)
    assert not crowd.may_accept(100.0)
    assert crowd.in_the_way(100.0) == [7]
    assert crowd.next_look(100.0) == 100.0 + PAUSE
    assert crowd.may_accept(100.0 + PAUSE)


def test_a_descriptor_that_is_used_again_has_a_new_age(crowd):
    crowd.add(7, 100.0)
    crowd.add(8, 100.1)
    crowd.add(7, 105.0)
    assert len(crowd) == 2
    assert crowd.in_the_way(105.0) == [8]


def test_there_is_room_for_others_where_few_descriptors_are_free(monkeypatch):
    monkeypatch.setattr(strangers.descriptors, "_free", lambda: 1000)
    assert Strangers(most=10_000).capacity <= 250
    assert Strangers(most=20).capacity == 20
    monkeypatch.setattr(strangers.descriptors, "_free", lambda: 0)
    assert Strangers(least=4).capacity == 4


def test_one_warning_a_minute_which_counts_the_others(caplog):
    log, now = logging.getLogger("collectives.test"), 0.0
    caplog.set_level(logging.DEBUG, log.name)
    warnings = RareWarnings(log, lambda: now)
    for now in (0.0, 1.0, SECONDS - 0.1, SECONDS, SECONDS + 1.0):
        warnings.warn("number %g", now)
    warnings.warn("other", kind="other")
    shown = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert shown == ["number 0", f"number {SECONDS:g} (and 2 more before, which are not shown)", "other"]


ACCEPT = {
    "collectives/net/strangers.py",
    "collectives/backends/shm/segment.py",  # processes of the same user on this host, one at a time
}


def test_nobody_else_accepts_connections():
    """So that each server has the limits."""
    servers = {"start_server", "create_unix_server", "start_unix_server", "HTTPServer", "make_server", "TCPSite"}
    found, strange = set(), set()
    for path in [
        path for layer in ("collectives", "executors", "hvd_cluster") for path in (ROOT / layer).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "accept":
                found |= {path.relative_to(ROOT).as_posix()}
            strange |= {f"{path}: {name}"} if name in servers else set()
    assert found == ACCEPT
    assert not strange
