"""What several tests of the engine share."""

import pytest

from tests.collectives.job import PATIENCE, InprocTransport, Job, SocketTransport


@pytest.fixture(params=[InprocTransport, SocketTransport])
def transport(request, monkeypatch):
    """Each test runs over both kinds of channel."""
    monkeypatch.setattr(Job, "transport", request.param)


@pytest.fixture
def patience(monkeypatch):
    """Where cores are scarce, what was decided is left to callers for as long as a test may take."""
    monkeypatch.setattr("collectives.engine.assembly.PATIENCE_SECONDS", PATIENCE)
