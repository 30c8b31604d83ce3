from __future__ import annotations

import builtins
import errno
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    NoDescriptorError,
    PeerLostError,
    ReduceOp,
    SettingsError,
    Topology,
)
from collectives.backends import registry
from collectives.backends.adasum import adasum
from collectives.backends.gloo import GlooBootstrap, transport
from collectives.backends.gloo.bootstrap import _Construction
from collectives.backends.gloo.connections import NOWHERE, Connections, open_sockets, unconnected_addresses
from collectives.backends.gloo.transport import GlooTransport
from collectives.backends.host import Workspace
from collectives.backends.messaging import MessagingBackend
from collectives.buffers import Buffer
from collectives.kernels.reduction import reduction
from collectives.net import interfaces
from collectives.settings import Settings
from collectives.store.memory import MemoryStore
from tests.collectives.backends import group_cases
from tests.collectives.backends.group_cases import LENGTHS, SOON
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix, shorten
from tests.collectives.backends.members import Processes, group_of
from tests.interrupts import interrupted

connect, with_backends = partial(group_cases.connect, GlooBootstrap), partial(group_cases.with_backends, GlooBootstrap)


@pytest.mark.parametrize("size", [2, 3])
def test_processes(size):
    """One launch for all that needs real processes but no death, because starting them takes longest."""
    with Processes(size, partial(group_cases.work_in_a_process, GlooBootstrap)) as processes:
        assert processes.results() == ["done"] * size


def test_killed_member():
    with Processes(3, partial(group_cases.reduce_in_a_process, GlooBootstrap)) as processes:
        for rank in range(3):
            assert processes.hear(rank) == "reducing"
        processes.kill(1)
        killed = time.monotonic()
        assert [processes.hear(rank) for rank in (0, 2)] == ["PeerLostError"] * 2
        assert time.monotonic() - killed < 15  # Gloo's timeout is 20 s


@pytest.mark.parametrize("size", [1, 4])
def test_threads(size):
    with_backends(size, lambda backend: run_matrix(backend, backend.rank, size))


def test_many_pieces(monkeypatch):
    shorten(monkeypatch, "collectives.backends.messaging.DIRECT")
    monkeypatch.setattr("collectives.backends.messaging.PIECE", 1)
    with_backends(3, lambda backend: run_matrix(backend, backend.rank, 3))


@pytest.mark.parametrize("operation", ["allreduce", "packed", "reducescatter", "allgather", "skewed", "adasum"])
def test_memory_is_bounded(operation, monkeypatch):
    """By some pieces, whatever the tensors have; there are two members in this process. torch's own is not seen."""

    def body(backend: MessagingBackend) -> None:
        backend.barrier()
        operations[operation](backend)

    def allgather(backend: MessagingBackend, counts: list[int]) -> None:
        result = results[backend.rank]
        own = result[: counts[0]] if backend.rank == 0 else result[counts[0] :]
        backend.allgather_bytes([own], [result[:5], result[5:]], counts)

    monkeypatch.setattr("collectives.backends.messaging.PIECE", 1 << 20)
    monkeypatch.setattr("collectives.backends.adasum.PIECE", 1 << 20)
    total = 1 << 25
    results = [np.zeros(total, np.uint8) for _ in range(2)]
    halves, floats = [each.view(np.uint16) for each in results], [each.view(np.float32) for each in results]
    kept = [np.zeros(total // 8, np.float32) for _ in range(2)]
    operations: dict[str, Callable[[MessagingBackend], None]] = {
        "allreduce": lambda backend: backend.allreduce_arrays(
            *[[halves[backend.rank]]] * 2, reduction(DType.BFLOAT16, ReduceOp.SUM)
        ),
        "packed": lambda backend: backend.allreduce_arrays(
            *[np.split(floats[backend.rank], 32)] * 2, reduction(DType.FLOAT32, ReduceOp.SUM)
        ),
        "reducescatter": lambda backend: backend.reducescatter_arrays(
            [floats[backend.rank]], [kept[backend.rank]], [total // 8] * 2, reduction(DType.FLOAT32, ReduceOp.SUM)
        ),
        "allgather": lambda backend: allgather(backend, [total // 2 - 1, total // 2 + 1]),
        "skewed": lambda backend: allgather(backend, [1, total - 1]),
        "adasum": lambda backend: adasum(
            backend, *[[Buffer(halves[backend.rank], DType.BFLOAT16, halves[backend.rank].shape)]] * 2
        ),
    }
    tracemalloc.start()
    try:
        with_backends(2, body)
        assert tracemalloc.get_traced_memory()[1] < total // 2
    finally:
        tracemalloc.stop()


def test_workspace_keeps_no_more_than_its_limit(monkeypatch):
    monkeypatch.setattr("collectives.backends.host.KEPT", 80)
    workspace = Workspace()
    kept, larger = workspace.take(10, DType.FLOAT64), workspace.take(11, DType.FLOAT64)
    assert (kept.size, larger.size) == (10, 11)
    assert np.may_share_memory(kept, workspace.take(20, DType.FLOAT32))
    assert not np.may_share_memory(larger, workspace.take(11, DType.FLOAT64))


@LENGTHS
def test_abort_reaches_members_that_do_not_talk_to_the_aborted_one(length):
    group_cases.check_abort_reaches_others(GlooBootstrap, length)


@LENGTHS
def test_silent_member(length):
    group_cases.check_silent_member(GlooBootstrap, length)


def test_abort_before_a_call_and_after_close():
    group_cases.check_abort_before_a_call_and_after_close(GlooBootstrap)


def test_closing_is_idempotent_and_peers_notice():
    group_cases.check_closing(GlooBootstrap)


def test_an_operation_that_nothing_can_end_is_left_to_a_thread(monkeypatch):
    """As on a system without /proc: Gloo's own timeout ends the operation, and nobody waits for that."""
    monkeypatch.setattr(Connections, "shut_down", lambda self: None)
    limit = 2.0

    def body(backend: MessagingBackend) -> None:
        if backend.rank == 0:
            abort_from_thread(backend, np.ones(8, np.float32))
            started = time.monotonic()
            backend.close()
            assert time.monotonic() - started < limit / 2
        left.wait(20)

    left = threading.Barrier(2)
    with_backends(2, body, timeout=limit)


def test_a_hundred_groups_leave_nothing():
    with_backends(2, MessagingBackend.barrier)
    threads, descriptors = _threads_and_descriptors()
    for _ in range(100):
        with_backends(2, MessagingBackend.barrier)
    deadline = time.monotonic() + 5  # The system shows a thread for a moment after it was joined.
    while _threads_and_descriptors() > (threads, descriptors) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads_and_descriptors() <= (threads, descriptors)


def test_a_duplicate_that_another_thread_held_for_a_moment_is_no_lost_connection():
    def body(backend: MessagingBackend) -> None:
        connections = backend._transport._connections
        duplicates = [os.dup(each) for each in open_sockets()]
        backend.barrier()
        connections.find(connections._peers)
        backend.barrier()
        for each in duplicates:
            os.close(each)
        backend.barrier()
        assert not connections.broken()

    with_backends(2, body)


@pytest.mark.parametrize("call", ["dup", "listdir"])
def test_a_lack_of_descriptors_is_no_lost_connection(call, monkeypatch):
    """Connections are found without a free descriptor, and can be shut down."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def body(backend: MessagingBackend) -> None:
        connections = backend._transport._connections
        if backend.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                assert not connections.broken()
                connections.shut_down()
        else:
            assert isinstance(reduce_until_error(backend, 8, 20), PeerLostError)
        left.wait(20)

    left = threading.Barrier(2)
    with_backends(2, body, SOON)


def test_a_lack_of_descriptors_is_named_where_gloo_begins_to_listen(monkeypatch):
    def refuse(**_: object) -> None:
        raise RuntimeError("[enforce fail at device.cc:1] fd_ != -1. socket: Too many open files")

    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "create_device", refuse)
    with pytest.raises(NoDescriptorError, match="raise the limit of ulimit -n"):
        GlooBootstrap(group_of(2), 20.0)


def test_nobody_comes():
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 on host '.*' did not come in time to connect"):
        connect(group_of(2), MemoryStore(), patience=0.05)


def test_an_interrupt_at_any_line_of_the_preparation_leaves_no_thread_and_no_descriptor():
    made, number = [], 0
    functions = GlooBootstrap.__init__, _Construction.__init__, _Construction.begin
    while interrupted(number, functions, lambda: made.append(GlooBootstrap(group_of(2), SOON))):
        number += 1
    made[0].close()
    assert number > 10


def test_an_address_of_another_host():
    with pytest.raises(SettingsError, match=r"'192\.0\.2\.1'.*interfaces of this host are: .*lo"):
        GlooBootstrap(group_of(1), 20.0, "192.0.2.1")


@pytest.mark.skipif(not interfaces._ipv6("lo"), reason="no IPv6 here")
def test_ipv6():
    def body(backend):
        run_matrix(backend, backend.rank, 2)
        backend.wait_for_all()
        if backend.rank:  # closes its connections, which the other member finds by their addresses
            backend.abort(PeerLostError("told to leave"))
        else:
            assert isinstance(reduce_until_error(backend, 8, 20), PeerLostError)

    with_backends(2, body, address="::1")


def listeners():
    """The sockaddrs that this process listens on."""
    return unconnected_addresses(set(open_sockets()))


@pytest.mark.parametrize(
    ("hosts", "chosen", "address"),
    [("aa", "", "127.0.0.1"), ("ab", "", "127.0.0.7"), ("aa", "lo", "127.0.0.7")],
    ids=["one host", "two hosts", "the user's choice"],
)
def test_ranks_of_one_host_listen_where_no_other_host_reaches_them(hosts, chosen, address):
    """127.0.0.7 stands for a public address."""
    before = listeners()
    topology = Topology(0, 2, hosts=tuple(hosts))
    bootstrap, _ = registry.prepare([0, 1], topology, Settings(cpu_operations="gloo", interface=chosen), "127.0.0.7")
    assert [socket.inet_ntoa(end[4:8]) for end in listeners() - before] == [address]
    bootstrap.close()


def test_without_torch(monkeypatch):
    def refuse(name: str, *rest: object) -> object:
        if name.startswith("torch"):
            raise ImportError(name)
        return importing(name, *rest)

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'hvd-cluster\[torch\]'"):
        GlooBootstrap(group_of(1), 20.0)


@pytest.mark.parametrize(("timeout", "expected"), [(0.01, CollectiveTimeoutError), (20.0, PeerLostError)])
def test_an_operation_that_stays_unfinished_without_its_connection(timeout, expected, monkeypatch):
    """On a busy machine Gloo closes the connection at its timeout, and reports the timeout much later."""

    class Unfinished:
        def wait(self, limit):
            clock.now += limit.total_seconds()
            raise RuntimeError("the wait has expired")

        def is_completed(self):
            return False

    class Broken(Connections):
        def broken(self):
            return True

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(transport, "time", clock)
    waiting = GlooTransport(group_of(2), SimpleNamespace(barrier=Unfinished), Broken(NOWHERE), timeout)
    with pytest.raises(expected, match="rank 1 on host"):
        waiting.barrier()


def _threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
