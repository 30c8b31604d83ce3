"""How the members of a TCP group connect."""

from __future__ import annotations

import logging
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError
from collectives.backends.tcp import TcpBackend, TcpBootstrap
from collectives.net import interfaces
from collectives.net.attempts import ConnectAttempt
from collectives.net.frames import NONCE_BYTES, frame
from collectives.net.interfaces import LOOPBACK
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.tcp.groups import SECRET, bootstrap_of, with_backends
from tests.interrupts import interrupted


def test_nobody_comes():
    with pytest.raises(CollectiveTimeoutError, match="rank 1 on host 'a' did not connect in time; look at") as caught:
        connect_alone(position=0)
    assert caught.value.ranks == (1,)


def test_a_member_that_listens_no_more():
    """Whether it has ended is known to the control channel only."""
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 on host 'a' did not connect in time \(rank 0 does not"):
        connect_alone(position=1)


def test_an_abort_ends_a_start():
    error = PeerLostError("told to stop")
    with ConnectAttempt(20.0) as attempt:
        bootstrap = bootstrap_of(group_of(2))
        ender = threading.Timer(0.1, attempt.abort, [error])
        ender.start()
        with pytest.raises(PeerLostError) as caught:
            bootstrap.connect([bootstrap.offer, b""], attempt)
        bootstrap.close()
        ender.join()
    assert caught.value is error


def test_another_secret_opens_nothing(caplog):
    """The stranger is refused, and a member that comes later is admitted."""

    def body(rank: int) -> object:
        with ConnectAttempt(20.0) as attempt:
            if rank == 0:
                return bootstraps[0].connect(both, attempt)
            with pytest.raises(PeerLostError, match="does not know the secret of this job"):
                stranger.connect(both, attempt)
            return bootstraps[1].connect(both, attempt)

    bootstraps = [bootstrap_of(group_of(2, rank)) for rank in range(2)]
    stranger = bootstrap_of(group_of(2, 1), secret=b"of another job")
    both = [bootstrap.offer for bootstrap in bootstraps]
    with caplog.at_level(logging.WARNING):
        for backend in in_threads(2, body):
            backend.close()
    assert "a connection to rank 0 was refused" in caplog.text
    for bootstrap in (*bootstraps, stranger):
        bootstrap.close()


def test_a_listener_without_the_secret_gets_no_data():
    """It has taken the port of a member, and knows what that one would say first."""

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(entry["id"].encode() + bytes(NONCE_BYTES))
            heard.append(connection.recv(1 << 16))
            connection.sendall(frame(bytes(40)))

    heard: list[bytes] = []
    with socket.create_server((LOOPBACK, 0)) as listener:
        entry = {"id": "1" * 16, "host": "", "tcp": listener.getsockname()}
        thread = threading.Thread(target=pretend)
        thread.start()
        bootstrap = bootstrap_of(group_of(2, 1))
        with ConnectAttempt(20.0) as attempt, pytest.raises(PeerLostError, match="does not know the secret"):
            bootstrap.connect([msgpack.packb(entry), bootstrap.offer], attempt)
        bootstrap.close()
        thread.join()
    assert SECRET not in heard[0]


@pytest.mark.parametrize("word", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100], ids=["silent", "HTTP", "nonsense"])
def test_strangers_do_not_keep_members_from_connecting(word, monkeypatch):
    """There are more than may wait at once, and they came first."""

    def body(rank: int) -> None:
        with ConnectAttempt(20.0) as attempt:
            backend = bootstraps[rank].connect(both, attempt)
        backend.barrier()
        left.wait(20)
        backend.close()

    bootstraps = [bootstrap_of(group_of(2, rank)) for rank in range(2)]
    both, left = [bootstrap.offer for bootstrap in bootstraps], threading.Barrier(2)
    monkeypatch.setattr("collectives.handshake.listeners.MOST_CANDIDATES", 4)
    strangers = [socket.create_connection(tuple(msgpack.unpackb(both[0])["tcp"])) for _ in range(6)]
    for stranger in strangers:
        stranger.sendall(word)
    in_threads(2, body)
    for stranger in strangers:
        stranger.close()
    for bootstrap in bootstraps:
        bootstrap.close()


def test_an_interrupt_at_any_line_of_the_preparation_leaves_no_descriptor():
    made, number = [], 0
    while interrupted(number, (TcpBootstrap.__init__,), lambda: made.append(bootstrap_of(group_of(2)))):
        number += 1
    made[0].close()
    assert number > 5


def test_an_address_of_another_host():
    with pytest.raises(SettingsError, match=r"rank 0 cannot listen on \('192\.0\.2\.1', 0\)"):
        bootstrap_of(group_of(1), address="192.0.2.1")


def test_no_descriptor_left():
    """The error names the remedy, see collectives/net/descriptors.py."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises((OSError, SettingsError), match="Too many open files"):
            bootstrap_of(group_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(not interfaces._ipv6("lo"), reason="no IPv6 here")
def test_ipv6():
    with_backends(2, TcpBackend.barrier, address="::1")


ROOT = Path(__file__).parents[4]


WITHOUT_TORCH = """
import sys
from collectives.api import Topology
from collectives.backends.registry import preload, prepare
from collectives.settings import Settings
settings = Settings()
preload(settings)
bootstraps = prepare((0, 1), Topology(0, 2, hosts=("a", "b"), cores=1), settings, "127.0.0.1")
for bootstrap in bootstraps:
    bootstrap.close()
assert type(bootstraps[0]).__name__ == "TcpBootstrap"
assert "torch" not in sys.modules
"""


def test_ranks_of_two_hosts_need_no_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, timeout=60, check=True)


def connect_alone(position: int) -> None:
    """While the other member of two has gone."""
    other = bootstrap_of(group_of(2, 1 - position))
    other.close()
    bootstrap = bootstrap_of(group_of(2, position))
    try:
        with ConnectAttempt(0.1) as attempt:
            bootstrap.connect(sorted([bootstrap.offer, other.offer], key=lambda each: each is not other.offer), attempt)
    finally:
        bootstrap.close()
