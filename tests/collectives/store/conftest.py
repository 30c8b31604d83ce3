"""A server, a client and every kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collectives.api import (
    Store,
)
from collectives.store.client import RendezvousClient
from collectives.store.memory import MemoryStore, PrefixStore
from collectives.store.server import RendezvousServer
from tests.collectives.store.wire import BODY_LIMIT, SECRET


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(SECRET, body_limit=BODY_LIMIT, stop_timeout=0.3) as server:
        yield server


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[RendezvousClient]:
    with RendezvousClient(server.address, server.port, SECRET) as client:
        yield client


@pytest.fixture(params=["memory", "prefix", "client", "in-process"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "prefix":
        return PrefixStore(MemoryStore(), "job/7")
    if request.param == "client":
        return request.getfixturevalue("client")
    return request.getfixturevalue("server").store
