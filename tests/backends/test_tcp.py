from __future__ import annotations

import logging
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest

from collectives import interfaces
from collectives.api import (
    CollectiveTimeoutError,
    DType,
    HorovodInternalError,
    PeerLostError,
    ReduceOp,
    SettingsError,
    ShutDownError,
)
from collectives.attempt import ConnectAttempt
from collectives.backends.tcp import TcpBackend, TcpJoining
from collectives.backends.tcp.encryption import Encryption, _identity
from collectives.backends.tcp.link import Link
from collectives.backends.tcp.poller import Poller
from collectives.backends.tcp.pump import SLICE_SECONDS
from collectives.backends.tcp.secure_link import SecureLink
from collectives.control.handshake.frames import NONCE_BYTES
from collectives.interfaces import LOOPBACK
from collectives.rendezvous.store import MemoryStore, PrefixStore
from tests.backends import offers
from tests.backends.matrix import abort_from_thread, reduce_until_error, run_matrix
from tests.backends.members import Member, Processes, group_of, in_threads
from tests.interrupts import interrupted

SECRET = b"of the job"
ROOT = Path(__file__).parents[2]
LENGTHS = pytest.mark.parametrize("length", [8, 1_000_000], ids=["at once", "in a pipeline"])


@pytest.mark.parametrize("size", [2, 3])
def test_processes(size):
    """One launch for all that needs real processes but no death, because starting them takes longest."""
    with Processes(size, _work_in_a_process) as processes:
        assert processes.results() == ["done"] * size


def test_killed_member():
    with Processes(3, _reduce_until_error) as processes:
        for rank in range(3):
            assert processes.hear(rank) == "reducing"
        processes.kill(1)
        assert [processes.hear(rank)[0] for rank in (0, 2)] == ["PeerLostError"] * 2


def test_stopped_member():
    """It is named by a member that still misses its data, and by none as the only one that may be late."""
    with Processes(3, _reduce_until_late) as processes:
        for rank in range(3):
            assert processes.hear(rank) == "reducing"
        processes.stop(1)
        errors = [processes.hear(rank) for rank in (0, 2)]
        assert "CollectiveTimeoutError" in [kind for kind, _ in errors]
        assert all(1 in ranks for kind, ranks in errors if kind == "CollectiveTimeoutError")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads(size):
    with_backends(size, lambda backend: run_matrix(backend, backend.rank, size))


@pytest.mark.parametrize("size", [2, 3])
def test_many_pieces(size, monkeypatch):
    """Nothing is small, packed tensors go in pieces, and no piece is long."""
    monkeypatch.setattr("collectives.backends.tcp.backend.DIRECT", 0)
    monkeypatch.setattr("collectives.backends.tcp.backend.PIECE", 1 << 10)
    monkeypatch.setattr("collectives.backends.tcp.transport.CHAIN", 4)
    monkeypatch.setattr("collectives.backends.tcp.transport.CHAIN_PIECE", 1 << 12)
    monkeypatch.setattr("collectives.backends.tcp.reducing.PIECE", 1 << 12)
    monkeypatch.setattr("collectives.backends.tcp.reducing.LEAST_PIECE", 1 << 12)
    with_backends(size, lambda backend: run_matrix(backend, backend.rank, size))


def test_a_tiny_buffer_of_the_kernel(monkeypatch):
    """So that most calls send and receive a part only."""

    def connect_narrowly(rank: int) -> TcpBackend:
        backend = connect(group_of(3, rank), store)
        for link in backend._tcp._links.values():
            link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return backend

    def body(backend: TcpBackend) -> None:
        for length in (5, 100_001):
            values = np.full(length, backend.rank, np.int64)
            backend.allreduce_arrays([values], [values], DType.INT64, ReduceOp.SUM)
            assert (values == 3).all()
            result = np.empty(3 * length, np.uint8)
            backend.allgather_bytes([np.full(length, backend.rank, np.uint8)], np.split(result, 3), [length] * 3)
            assert (result.reshape(3, length) == [[0], [1], [2]]).all()

    store = MemoryStore()
    offers.with_backends(3, connect_narrowly, body)


@pytest.mark.parametrize("operation", ["allreduce", "packed", "reducescatter", "allgather", "broadcast"])
def test_memory_is_bounded(operation, monkeypatch):
    """By some pieces, whatever the tensors have; there are two members in this process."""

    def body(backend: TcpBackend) -> None:
        backend.barrier()
        operations[operation](backend)

    def allgather(backend: TcpBackend) -> None:
        result = results[backend.rank]
        half = np.split(result, 2)[backend.rank]
        backend.allgather_bytes([half], [result[:5], result[5:]], [total // 2] * 2)

    monkeypatch.setattr("collectives.backends.tcp.backend.PIECE", 1 << 20)
    total = 1 << 25
    results = [np.zeros(total, np.uint8) for _ in range(2)]
    floats = [each.view(np.float32) for each in results]
    kept = [np.zeros(total // 8, np.float32) for _ in range(2)]
    operations: dict[str, Callable[[TcpBackend], None]] = {
        "allreduce": lambda backend: backend.allreduce_arrays(
            *[[results[backend.rank].view(np.uint16)]] * 2, DType.BFLOAT16, ReduceOp.SUM
        ),
        "packed": lambda backend: backend.allreduce_arrays(
            *[np.split(floats[backend.rank], 1 << 13)] * 2, DType.FLOAT32, ReduceOp.SUM
        ),
        "reducescatter": lambda backend: backend.reducescatter_arrays(
            [floats[backend.rank]], [kept[backend.rank]], [total // 8] * 2, DType.FLOAT32, ReduceOp.SUM
        ),
        "allgather": allgather,
        "broadcast": lambda backend: backend.broadcast_bytes(*[results[backend.rank]] * 2, 1),
    }
    tracemalloc.start()
    try:
        with_backends(2, body)
        assert tracemalloc.get_traced_memory()[1] < total // 2
    finally:
        tracemalloc.stop()


@LENGTHS
def test_abort_reaches_members_that_do_not_talk_to_the_aborted_one(length):
    def body(backend: TcpBackend) -> None:
        if backend.rank == 2:
            abort_from_thread(backend, np.ones(length, np.float32))
        elif backend.rank:  # Rank 0 takes no part, so that nobody can finish.
            assert isinstance(reduce_until_error(backend, length, 20), PeerLostError)
        left.wait(20)

    left = threading.Barrier(4)
    with_backends(4, body)


@LENGTHS
def test_silent_member(length):
    def body(backend: TcpBackend) -> None:
        if backend.rank == 0:
            error = reduce_until_error(backend, length, 20)
            assert isinstance(error, CollectiveTimeoutError)
            assert str(error).startswith("rank 1 on host 'a' did not answer in time")
            assert error.ranks == (1,)
            with pytest.raises(CollectiveTimeoutError):
                backend.barrier()
        noticed.wait(20)

    noticed = threading.Barrier(2)
    with_backends(2, body, timeout=0.5)


def test_a_member_that_does_not_read_is_late():
    """The data is more than the kernel keeps for it."""

    def body(backend: TcpBackend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="rank 1 on host 'a' did not answer in time") as caught:
                backend.broadcast_bytes(*[np.zeros(1 << 27, np.uint8)] * 2, 0)
            assert caught.value.ranks == (1,)
        noticed.wait(20)

    noticed = threading.Barrier(2)
    with_backends(2, body, timeout=0.5)


def test_abort_before_a_call_and_after_close():
    def body(backend: TcpBackend) -> None:
        error = HorovodInternalError("told to stop")
        backend.abort(error)
        for call in (backend.barrier, lambda: backend.allgather_bytes([EMPTY], [EMPTY], [0, 0])):
            with pytest.raises(HorovodInternalError) as caught:
                call()
            assert caught.value is error
        backend.close()
        backend.abort(error)

    with_backends(2, body)


def test_an_aborted_member_moves_no_data():
    def body(backend: TcpBackend) -> None:
        error = HorovodInternalError("told to stop")
        backend.abort(error)
        with pytest.raises(HorovodInternalError) as caught:
            backend._tcp._pump.flush()
        assert caught.value is error

    with_backends(2, body)


EMPTY = np.empty(0, np.uint8)


def test_closing_is_idempotent_and_peers_notice():
    def body(backend: TcpBackend) -> None:
        if backend.rank == 0:
            backend.close()
            backend.close()
            with pytest.raises(ShutDownError):
                backend.barrier()
        else:
            error = reduce_until_error(backend, 8, 20)
            assert isinstance(error, PeerLostError)
            assert (error.ranks, error.hosts) == ((0,), ("a",))
            assert "the connection to rank 0 on host 'a' is gone" in str(error)

    with_backends(2, body)


def test_the_last_data_of_a_member_that_closes_arrives():
    def body(backend: TcpBackend) -> None:
        data = np.full(1 << 20, backend.rank, np.uint8)
        if backend.rank == 0:
            backend.broadcast_bytes(data, data, 0)
            backend.close()
            closed.set()
        else:
            assert closed.wait(20)
            backend.broadcast_bytes(data, data, 0)
            assert not data.any()

    closed = threading.Event()
    with_backends(2, body)


def test_a_member_that_closes_after_its_part_is_no_loss_for_those_that_still_work():
    """As when a process set is removed: the root of a broadcast is done long before the last member."""

    def body(backend: TcpBackend) -> None:
        data = np.full(1 << 20, backend.rank, np.uint8)
        if backend.rank == 1:
            assert closed.wait(20)  # while member 2 sleeps
            time.sleep(3 * SLICE_SECONDS)
        if backend.rank == 0:
            backend.allgather_bytes([EMPTY], [EMPTY], [0] * 3)
            backend._tcp.exchange([(other, data) for other in (1, 2)], [])
            backend.close()
            closed.set()
        else:
            others = [other for other in range(3) if other != backend.rank]
            backend._tcp.exchange(
                [(other, data) for other in others if other], [(other, np.empty_like(data)) for other in others]
            )

    closed = threading.Event()
    with_backends(3, body)


def test_the_end_of_a_link_does_not_end_the_sleep_of_a_member_that_has_no_memory_for_its_data():
    """As in a pipeline: another member is behind, and the one that has ended has sent all. It would be a busy loop."""
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    poller = Poller()
    near.receive(iter([None, memoryview(bytearray(1))]))
    far.send([memoryview(b"x")])
    assert far.step()
    assert not near.step()
    far.close()
    assert poller.sleep([near], SLICE_SECONDS) == set()
    assert near.step()
    assert not near.is_receiving
    assert poller.sleep([near], 20.0) == {near.descriptor}
    near.close()
    poller.close()


def test_a_member_with_much_data_does_not_keep_the_others_waiting(monkeypatch):
    monkeypatch.setattr("collectives.backends.tcp.link.MOST_RECEIVED", 4)
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    data, found = bytearray(8), []
    far.send([memoryview(b"01234567")])
    assert far.step()
    assert select.select([near.descriptor], [], [], 20)[0]
    near.receive(iter([memoryview(data)[start : start + 2] for start in range(0, 8, 2)]))
    while near.is_receiving:  # no step without data: it would let the member sleep
        assert near.step()
        found.append(bytes(data).rstrip(b"\0"))
    assert found == [b"0123", b"01234567"]
    near.close()
    far.close()


def test_an_operation_without_data_is_over_at_once():
    """A step that moves nothing would let the member sleep, though it has nothing to wait for."""
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    near.receive(iter([]))
    assert near.step()
    assert not near.is_receiving
    near.close()
    far.close()


def test_a_member_may_owe_any_number_of_scripts():
    """They run in their order; nested iterators of so many would exhaust the stack of the process."""
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    data = bytearray(2)
    near.receive(iter([memoryview(data)[:1]]))
    for _ in range(1_000_000):
        near.receive(iter(()))
    near.receive(iter([memoryview(data)[1:]]))
    far.send([memoryview(b"xy")])
    assert far.step()
    assert select.select([near.descriptor], [], [], 20)[0]
    while near.is_receiving:
        near.step()
    assert data == b"xy"
    near.close()
    far.close()


def connected_sockets() -> list[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return [near, listener.accept()[0]]


def test_a_hundred_groups_leave_nothing():
    threads = set(threading.enumerate())
    descriptors = os.listdir("/proc/self/fd")
    for _ in range(100):
        with_backends(2, TcpBackend.barrier)
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


# Encryption.


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
            return joinings[rank].connect(both, attempt)

    word = b"known to the two members only"
    for encrypted in (True, False):
        joinings = [TcpJoining(group_of(2, rank), 20.0, LOOPBACK, SECRET, True, encrypted) for rank in range(2)]
        entry = msgpack.unpackb(joinings[0].offer)
        with Eavesdropper(entry["tcp"]) as between:
            both = [msgpack.packb({**entry, "tcp": between.address}), joinings[1].offer]
            offers.with_backends(2, connect_through, lambda backend: _send(backend, word * 100))
        assert (word in between.heard) is not encrypted
        for joining in joinings:
            joining.close()


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
        TcpJoining(group_of(2), 20.0, LOOPBACK, SECRET, True, encrypted=True)


# How members connect.


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
        joining = TcpJoining(group_of(2), 20.0, LOOPBACK, SECRET, True)
        ender = threading.Timer(0.1, attempt.abort, [error])
        ender.start()
        with pytest.raises(PeerLostError) as caught:
            joining.connect([joining.offer, b""], attempt)
        joining.close()
        ender.join()
    assert caught.value is error


def test_another_secret_opens_nothing(caplog):
    """The stranger is refused, and a member that comes later is admitted."""

    def body(rank: int) -> object:
        with ConnectAttempt(20.0) as attempt:
            if rank == 0:
                return joinings[0].connect(both, attempt)
            with pytest.raises(PeerLostError, match="does not know the secret of this job"):
                stranger.connect(both, attempt)
            return joinings[1].connect(both, attempt)

    joinings = [TcpJoining(group_of(2, rank), 20.0, LOOPBACK, SECRET, True) for rank in range(2)]
    stranger = TcpJoining(group_of(2, 1), 20.0, LOOPBACK, b"of another job", True)
    both = [joining.offer for joining in joinings]
    with caplog.at_level(logging.WARNING):
        for backend in in_threads(2, body):
            backend.close()
    assert "a connection to rank 0 was refused" in caplog.text
    for joining in (*joinings, stranger):
        joining.close()


def test_a_listener_without_the_secret_gets_no_data():
    """It has taken the port of a member, and knows what that one would say first."""

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(entry["id"].encode() + bytes(NONCE_BYTES))
            heard.append(connection.recv(1 << 16))
            connection.sendall(b"\0\0\0\x28" + bytes(40))

    heard: list[bytes] = []
    with socket.create_server((LOOPBACK, 0)) as listener:
        entry = {"id": "1" * 16, "host": "", "tcp": listener.getsockname()}
        thread = threading.Thread(target=pretend)
        thread.start()
        joining = TcpJoining(group_of(2, 1), 20.0, LOOPBACK, SECRET, True)
        with ConnectAttempt(20.0) as attempt, pytest.raises(PeerLostError, match="does not know the secret"):
            joining.connect([msgpack.packb(entry), joining.offer], attempt)
        joining.close()
        thread.join()
    assert SECRET not in heard[0]


@pytest.mark.parametrize("word", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100], ids=["silent", "HTTP", "nonsense"])
def test_strangers_do_not_keep_members_from_connecting(word, monkeypatch):
    """There are more than may wait at once, and they came first."""

    def body(rank: int) -> None:
        with ConnectAttempt(20.0) as attempt:
            backend = joinings[rank].connect(both, attempt)
        backend.barrier()
        left.wait(20)
        backend.close()

    joinings = [TcpJoining(group_of(2, rank), 20.0, LOOPBACK, SECRET, True) for rank in range(2)]
    both, left = [joining.offer for joining in joinings], threading.Barrier(2)
    monkeypatch.setattr("collectives.control.handshake.candidates.MOST_CANDIDATES", 4)
    strangers = [socket.create_connection(tuple(msgpack.unpackb(both[0])["tcp"])) for _ in range(6)]
    for stranger in strangers:
        stranger.sendall(word)
    in_threads(2, body)
    for stranger in strangers:
        stranger.close()
    for joining in joinings:
        joining.close()


def test_an_interrupt_at_any_line_of_the_preparation_leaves_no_descriptor():
    made, number = [], 0
    while interrupted(
        number, (TcpJoining.__init__,), lambda: made.append(TcpJoining(group_of(2), 20.0, LOOPBACK, SECRET, True))
    ):
        number += 1
    made[0].close()
    assert number > 5


def test_an_address_of_another_host():
    with pytest.raises(SettingsError, match=r"rank 0 cannot listen on \('192\.0\.2\.1', 0\)"):
        TcpJoining(group_of(1), 20.0, "192.0.2.1", SECRET, True)


def test_no_descriptor_left():
    """The error names the remedy, see collectives/descriptors.py."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises((OSError, SettingsError), match="Too many open files"):
            TcpJoining(group_of(2), 20.0, LOOPBACK, SECRET, True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(not interfaces._ipv6("lo"), reason="no IPv6 here")
def test_ipv6():
    with_backends(2, TcpBackend.barrier, address="::1")


WITHOUT_TORCH = """
import sys
from collectives.api import Topology
from collectives.backends.table import preload, prepare
from collectives.settings import Settings
settings = Settings()
preload(settings)
joinings = prepare((0, 1), Topology(0, 2, hosts=("a", "b"), cores=1), settings, "127.0.0.1")
for joining in joinings:
    joining.close()
assert type(joinings[0]).__name__ == "TcpJoining"
assert "torch" not in sys.modules
"""


def test_ranks_of_two_hosts_need_no_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, timeout=60, check=True)


def connect_alone(position: int) -> None:
    """While the other member of two has gone."""
    other = TcpJoining(group_of(2, 1 - position), 20.0, LOOPBACK, SECRET, True)
    other.close()
    joining = TcpJoining(group_of(2, position), 20.0, LOOPBACK, SECRET, True)
    try:
        with ConnectAttempt(0.1) as attempt:
            joining.connect(sorted([joining.offer, other.offer], key=lambda each: each is not other.offer), attempt)
    finally:
        joining.close()


def connect(group, store, timeout=20.0, address=LOOPBACK, encrypted=False) -> TcpBackend:
    """``timeout`` bounds operations."""
    return offers.meet(TcpJoining(group, timeout, address, SECRET, True, encrypted), store, 20.0)


def with_backends(size, body, timeout=20.0, address=LOOPBACK, encrypted=False):
    store = MemoryStore()
    offers.with_backends(size, lambda rank: connect(group_of(size, rank), store, timeout, address, encrypted), body)


def _work_in_a_process(member: Member) -> str:
    backend = _join(member, "matrix")
    run_matrix(backend, member.rank, member.size)
    backend.close()
    backend = _join(member, "abort")
    member.meet_others("connected")
    if member.rank == 0:
        abort_from_thread(backend, np.ones(1_000_000, np.float32))
    member.meet_others("aborted")
    if member.rank:
        assert isinstance(reduce_until_error(backend, 1_000_000, 20), PeerLostError)
    backend.close()
    return "done"


def _reduce_until_error(member: Member) -> tuple[str, tuple[int, ...]]:
    backend = _join(member, "group")
    backend.barrier()
    member.tell("reducing")
    error = reduce_until_error(backend, 1_000_000, 60)
    backend.close()
    return type(error).__name__, error.ranks


def _reduce_until_late(member: Member) -> tuple[str, tuple[int, ...]]:
    backend = _join(member, "group", timeout=1.0)
    backend.barrier()
    member.tell("reducing")
    error = reduce_until_error(backend, 1_000_000, 60)
    time.sleep(0.5)
    backend.close()
    return type(error).__name__, error.ranks


def _join(member: Member, name: str, timeout: float = 20.0) -> TcpBackend:
    return connect(group_of(member.size, member.rank), PrefixStore(member.store, name), timeout)
