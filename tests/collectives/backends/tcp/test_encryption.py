"""Connections of a TCP group in TLS."""

from __future__ import annotations

import select
import socket
import sys
import threading

import msgpack
import numpy as np
import pytest

from collectives.api import PeerLostError, SettingsError
from collectives.backends.tcp import TcpBackend
from collectives.backends.tcp.encryption import Encryption, _identity
from collectives.backends.tcp.link import SecureLink
from collectives.net.attempts import ConnectAttempt
from collectives.net.interfaces import LOOPBACK
from tests.collectives.backends import offers
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.tcp.groups import LENGTHS, SECRET, bootstrap_of, connected_sockets, with_backends


@pytest.mark.parametrize("size", [2, 3])
def test_encrypted(size):
    with_backends(size, lambda backend: run_matrix(backend, backend.rank, size), encrypted=True)


@LENGTHS
def test_the_end_of_an_encrypted_connection(length):
    def body(backend: TcpBackend) -> None:
        if backend.rank == 0:
            abort_from_thread(backend, np.ones(length, np.float32))
            aborted.set()
        else:
            assert aborted.wait(20)
            assert isinstance(reduce_until_error(backend, length, 20), PeerLostError)
        left.wait(20)

    aborted, left = threading.Event(), threading.Barrier(2)
    with_backends(2, body, encrypted=True)


def test_a_long_send_over_tls_shows_that_it_goes_on():
    """Else a member that sends for longer than the timeout, and receives nothing, would give up."""

    def secure(rank: int) -> SecureLink:
        sockets[rank].setblocking(False)
        with ConnectAttempt(20.0) as attempt:
            return SecureLink(Encryption(SECRET).wrap(sockets[rank], rank == 0, 1 - rank, attempt), 1 - rank)

    sockets = connected_sockets()
    near, far = in_threads(2, secure)
    sent, received = np.arange(1 << 21), np.zeros(1 << 21, np.int64)
    near.send([sent.view(np.uint8).data])
    far.receive(iter([received.view(np.uint8).data]))
    has_moved = [near.step()]
    while near.is_sending or far.is_receiving:
        far.step()
        has_moved.append(near.step())
    assert sum(has_moved) > 10
    assert (received == sent).all()
    near.close()
    far.close()


def test_nothing_readable_travels_on_an_encrypted_connection():
    """Between the members is somebody who reads along."""

    def connect_through(rank: int) -> TcpBackend:
        with ConnectAttempt(20.0) as attempt:
            return bootstraps[rank].connect(both, attempt)

    word = b"known to the two members only"
    for encrypted in (True, False):
        bootstraps = [bootstrap_of(group_of(2, rank), encrypted=encrypted) for rank in range(2)]
        entry = msgpack.unpackb(bootstraps[0].offer)
        with Eavesdropper(entry["tcp"]) as between:
            both = [msgpack.packb({**entry, "tcp": between.address}), bootstraps[1].offer]
            offers.with_backends(2, connect_through, lambda backend: _send(backend, word * 100))
        assert (word in between.heard) is not encrypted
        for bootstrap in bootstraps:
            bootstrap.close()


def _send(backend: TcpBackend, data: bytes) -> None:
    array = np.frombuffer(data, np.uint8).copy() if backend.rank == 0 else np.zeros(len(data), np.uint8)
    backend.broadcast_bytes(array, array, 0)
    assert array.tobytes() == data
    backend.barrier()


class Eavesdropper:
    """Passes one connection on to ``target``, and keeps what the two say."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = tuple(target)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address = self._listener.getsockname()
        self.heard = b""

    def __enter__(self) -> Eavesdropper:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(20)

    def _run(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(self._target) as far:
            others = {near: far, far: near}
            while others:
                for sock in select.select(list(others), [], [], 20)[0]:
                    data = sock.recv(1 << 16)
                    self.heard += data
                    if data:
                        others[sock].sendall(data)
                    else:
                        return


def test_a_man_in_the_middle_who_knows_another_secret_gets_nothing():
    """Both certificates are checked: neither side talks to one that follows from another secret."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ConnectAttempt(20.0) as attempt:
        for sock in (ours, theirs):
            sock.setblocking(False)

        def shake(rank: int) -> str:
            encryption = Encryption(SECRET if rank == 0 else b"of another job")
            with pytest.raises(PeerLostError, match="no encrypted connection to rank") as caught:
                encryption.wrap((ours, theirs)[rank], rank == 0, 1 - rank, attempt)
            return str(caught.value)

        assert "certificate" in in_threads(2, shake)[1].lower()


def test_all_members_have_one_certificate_and_another_secret_gives_another():
    assert _identity(SECRET) == _identity(SECRET)
    assert not set(_identity(SECRET)) & set(_identity(b"of another job"))


def test_encryption_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SettingsError, match=r"HVD_TCP_TLS needs.*pip install 'hvd-cluster\[tls\]'"):
        bootstrap_of(group_of(2), encrypted=True)
