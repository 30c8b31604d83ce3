"""Hosts for a test, in network namespaces; it is skipped where this machine can have none."""

import contextlib

import pytest

from tests.namespaces import Network, Unavailable


@contextlib.contextmanager
def network_or_skip():
    """A :class:`Network`; the test is skipped where this machine can have none."""
    try:
        with Network() as network:
            yield network
    except Unavailable as reason:
        pytest.skip(f"no hosts in network namespaces: {reason}")


@pytest.fixture
def network():
    """Two hosts in network namespaces of this machine, for one test."""
    with network_or_skip() as network:
        yield network
