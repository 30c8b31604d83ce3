"""What several tests of the engine share."""

import pytest

from tests.collectives.job import InprocTransport, Job, SocketTransport


@pytest.fixture(params=[InprocTransport, SocketTransport])
def transport(request, monkeypatch):
    """Each test runs over both kinds of channel."""
    monkeypatch.setattr(Job, "transport", request.param)
