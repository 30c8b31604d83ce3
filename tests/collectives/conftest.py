"""Fixtures of several tests of the engine."""

import pytest

from tests.collectives.engine.job import PATIENCE, InprocTransport, Job, SocketTransport, running


@pytest.fixture(params=[InprocTransport, SocketTransport])
def transport(request, monkeypatch):
    """Each test runs over both kinds of channel."""
    monkeypatch.setattr(Job, "transport", request.param)


@pytest.fixture
def patience(monkeypatch):
    """Where cores are scarce, what was decided is left to callers for as long as a test may take."""
    monkeypatch.setattr("collectives.engine.assembly.PATIENCE_SECONDS", PATIENCE)


KINDS = {
    "inproc": {},
    "shm": {"shared_memory": True},
    "mesh": {"over_tcp": True},
    "star": {"over_tcp": True, "in_star": True},
    "hosts": {"on_hosts": True},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def start(request, monkeypatch):
    """Starts a job: of threads that share everything, with shared memory, over TCP, or both; with sockets."""
    if request.param:
        monkeypatch.setattr(Job, "transport", SocketTransport)
    return lambda *args, **kwargs: running(*args, **request.param, **kwargs)


@pytest.fixture
def unhurried(monkeypatch):
    """No rank asks another to decline, and none reports that it waits, however slow this machine is."""
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", 1000.0)
    monkeypatch.setattr("collectives.stalls.stragglers.NOTEWORTHY_SHARE", 1000.0)
