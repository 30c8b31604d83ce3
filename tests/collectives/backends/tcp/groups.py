"""Groups over TCP in tests: how their members join, as threads or as processes; and two sockets that are connected."""

from __future__ import annotations

import socket
from functools import partial

import pytest

from collectives.backends.tcp import TcpBackend, TcpBootstrap
from collectives.net.interfaces import LOOPBACK
from collectives.store.memory import PrefixStore
from tests.collectives.backends import group_cases
from tests.collectives.backends.members import Member, group_of

SECRET = b"of the job"
SHAPES = pytest.mark.parametrize("crowded", [False, True], ids=["mesh", "star"])
LENGTHS = pytest.mark.parametrize("length", [8, 1_000_000], ids=["at once", "in a pipeline"])


def bootstrap_of(group, timeout=20.0, address=LOOPBACK, secret=SECRET, encrypted=False, crowded=True) -> TcpBootstrap:
    """``timeout`` bounds operations. Three or more members that are ``crowded`` vote in a star, others in a mesh."""
    return TcpBootstrap(group, timeout, address, secret, crowded, encrypted)


def connect(group, store, timeout=20.0, address=LOOPBACK, **options) -> TcpBackend:
    return group_cases.connect(partial(bootstrap_of, **options), group, store, timeout, address)


def with_backends(size, body, timeout=20.0, address=LOOPBACK, **options):
    group_cases.with_backends(partial(bootstrap_of, **options), size, body, timeout, address)


def join(member: Member, name: str, timeout: float = 20.0) -> TcpBackend:
    return connect(group_of(member.size, member.rank), PrefixStore(member.store, name), timeout)


def connected_sockets() -> list[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return [near, listener.accept()[0]]
