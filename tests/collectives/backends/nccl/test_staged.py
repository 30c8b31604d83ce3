"""Tensors on GPUs that go in stages: NCCL inside each host, and NCCL or a backend of the host between the hosts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from collectives.api import DType, HorovodInternalError, PeerLostError, ReduceOp, ShutDownError, Topology
from collectives.backends import registry
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.staged import StagedBackend
from collectives.backends.nccl.through_host import ThroughHostBackend
from collectives.backends.nccl.watcher import Watcher
from collectives.net.attempts import ConnectAttempt
from collectives.settings import Settings
from tests.collectives.backends.device import Uploading
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.matrix import run_matrix, shorten
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.nccl.fake import FakeDevice, FakeLibrary, FakeNetwork, connector
from tests.collectives.backends.nccl.gpus import gpu_of_each_thread
from tests.collectives.backends.nccl.streams import PATIENCE, LateStream

HOSTS = {"2+2": "aabb", "3+1": "aaab", "interleaved": "ababb"}
LARGE = 1 << 18


class Hosts:
    """Hosts of threads: ``letters`` has the host of each member. Between them is NCCL, or else memory of the host."""

    def __init__(self, letters, is_torus):
        self.letters, self.size, self._is_torus = letters, len(letters), is_torus
        self._network = FakeNetwork()
        self._hosts = group_of(self.size, 0, letters).by_host()
        self._columns = min(map(len, self._hosts))
        self._across = [InprocGroup(len(self._hosts)) for _ in range(self._columns)]

    def run(self, body):
        """``body(backend, device)`` on a thread of each member; what they return."""
        return in_threads(self.size, lambda rank: self._member(rank, body))

    def _member(self, rank, body):
        device = FakeDevice(rank)
        backend = self._backend(rank, device)
        try:
            return body(backend, device)
        finally:
            backend.close()
            device.close()

    def _backend(self, rank, device):
        def nccl(id, part):
            return NcclBackend(part, connector(library, id, part, device), watcher, PATIENCE)

        def across(column):
            part = group.part([members[column] for members in self._hosts])
            if self._is_torus:
                return nccl(b"column %d" % column, part)
            return ThroughHostBackend(InprocBackend(part, self._across[column]), lambda address: device)

        group, library, watcher = group_of(self.size, rank, self.letters), FakeLibrary(self._network), Watcher()
        host = next(index for index, members in enumerate(self._hosts) if rank in members)
        place = self._hosts[host].index(rank)
        local, flat = nccl(b"host %d" % host, group.part(self._hosts[host])), nccl(b"flat", group)
        cross = across(place) if place < self._columns else None
        return StagedBackend(local, cross, flat, self._columns, lambda address: device)


@pytest.fixture(params=[False, True], ids=["through the host", "torus"])
def is_torus(request):
    return request.param


@pytest.mark.parametrize("letters", HOSTS.values(), ids=HOSTS)
def test_matrix(letters, is_torus, monkeypatch):
    shorten(monkeypatch, *(f"collectives.backends.nccl.{name}" for name in ("backend.LARGE", "through_host.PIECE")))
    hosts = Hosts(letters, is_torus)
    hosts.run(
        lambda backend, device: run_matrix(
            Uploading(backend, device), backend.group.position, hosts.size, hosts.size + 2
        )
    )


def test_an_allreduce_does_not_connect_all_ranks(is_torus):
    """NCCL may have no way between the hosts, which is a reason for the stages."""

    def body(backend, device):
        tensor = device.upload(np.full(LARGE, backend.group.position + 1.0), DType.FLOAT64)
        empty = device.upload(np.zeros(0), DType.FLOAT64)
        backend.memory.fill(backend.memory.empty(DType.FLOAT64, (3,)), 0.0)
        ends = [backend.allreduce([each], [each], ReduceOp.SUM, 1.0, 0.5) for each in (empty, tensor)]
        assert all(end.wait(PATIENCE) for end in ends)
        return device.download(tensor)[[0, -1]].tolist(), backend._flat._link

    assert Hosts("aabb", is_torus).run(body) == [([5.0, 5.0], None)] * 4


def test_operations_begin_after_the_memory_is_ready_and_results_are_used_after_their_end(is_torus):
    def body(backend, device):
        user = LateStream()
        tensor, copy = (device.upload(np.zeros(9), DType.FLOAT64) for _ in range(2))
        tensor.ready = user.enqueue(lambda: device.upload_into(tensor, 5.0))
        backend.begin_after(tensor.ready)
        end = backend.allreduce([tensor], [tensor], ReduceOp.SUM)
        end.precede(user.handle)
        used = user.enqueue(lambda: device.upload_into(copy, device.download(tensor)[0] + 1.0))
        assert used.wait(PATIENCE)
        user.close()
        return device.download(copy)[0]

    assert Hosts("aab", is_torus).run(body) == [16.0] * 3


def test_an_abort_ends_what_has_begun_with_its_error(is_torus):
    """Rank 3 does not come. Rank 2 waits for it inside the host, rank 0 for rank 2 between the hosts."""

    def abort(backend):
        if backend.group.position:
            aborted.wait(PATIENCE)
        backend.abort(HorovodInternalError("told to stop"))

    def body(backend, device):
        tensor, rank = device.upload(np.ones(9), DType.FLOAT64), backend.group.position
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        met.wait(PATIENCE)
        aborter = threading.Timer(0.1, abort, [backend])
        aborter.start()
        error = None
        try:
            if rank < 3:
                backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        except HorovodInternalError as caught:
            error = str(caught)
        if rank == 0:
            aborted.set()
        aborter.join(PATIENCE)
        met.wait(PATIENCE)
        return error

    met, aborted = threading.Barrier(4), threading.Event()
    assert Hosts("aabb", is_torus).run(body)[0] == "told to stop"


def test_who_fails_in_one_stage_leaves_the_others():
    """So no member of the host waits for the one that carries its column."""

    def body(backend, device):
        tensor = device.upload(np.ones(9), DType.FLOAT64)
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        met.wait(PATIENCE)
        if backend.group.position == 2:
            backend.abort(HorovodInternalError("told to stop"))
        elif backend.group.position == 1:
            backend.allreduce([tensor], [tensor], ReduceOp.SUM)  # which waits for nobody
        else:
            with pytest.raises(PeerLostError):
                backend.allreduce([tensor], [tensor], ReduceOp.SUM)
            for part in backend._parts:
                with pytest.raises(PeerLostError):
                    part.allreduce([tensor], [tensor], ReduceOp.SUM)
        met.wait(PATIENCE)
        backend.abort(HorovodInternalError("the end"))
        return True

    met = threading.Barrier(3)
    assert Hosts("aab", False).run(body) == [True] * 3


def test_a_communicator_between_the_hosts_that_fails_ends_the_operation():
    """The stage inside the host, which comes last, knows nothing of it."""

    def body(backend, device):
        tensor = device.upload(np.ones(9), DType.FLOAT64)
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        met.wait(PATIENCE)
        end = backend.allreduce([tensor], [tensor], ReduceOp.SUM)
        backend._cross._life.fail(PeerLostError("the network is gone"))
        with pytest.raises(PeerLostError, match="the network is gone"):
            end.wait(PATIENCE)
        met.wait(PATIENCE)
        return True

    met = threading.Barrier(4)
    assert Hosts("aabb", True).run(body) == [True] * 4


@pytest.mark.parametrize(
    ("settings", "hosts", "chosen"),
    [
        (Settings(), "aabb", "nccl"),
        (Settings(hierarchical_allreduce=False), "aabb", "nccl"),
        (Settings(hierarchical_allreduce=True), "aabb", "hierarchical"),
        (Settings(torus_allreduce=True), "aabb", "hierarchical"),
        (Settings(torus_allreduce=True), "aaaa", "nccl"),
        (Settings(torus_allreduce=True), "abcd", "nccl"),
        (Settings(torus_allreduce=True, gpu_operations="mpi"), "aabb", "mpi"),
    ],
)
def test_who_asks_for_stages_gets_them(settings, hosts, chosen):
    assert registry.choose(range(4), Topology(0, 4, hosts=tuple(hosts)), settings, "cuda") == chosen


@pytest.fixture
def gpus(monkeypatch):
    return gpu_of_each_thread(monkeypatch)


@pytest.mark.parametrize(
    ("settings", "across"),
    [
        (Settings(torus_allreduce=True), "nccl"),
        (Settings(torus_allreduce=True, hierarchical_allreduce=True), "nccl"),
        (Settings(hierarchical_allreduce=True), "tcp"),
        (Settings(hierarchical_allreduce=True, cpu_operations="gloo"), "gloo"),
    ],
    ids=["torus", "both", "tcp", "gloo"],
)
def test_the_variables_say_how_the_hosts_are_joined(settings, across, gpus):
    def member(rank):
        topology = Topology(rank, 3, rank % 2, 2, hosts=tuple("aab"), cores=1)
        made[rank] = registry.prepare(range(3), topology, settings, "127.0.0.1")
        met.wait(PATIENCE)
        with ConnectAttempt(PATIENCE) as attempt:
            backend = made[rank][1].connect([made[each][1].offer for each in range(3)], attempt)
        device = gpus(0, rank)
        tensor = device.upload(np.full(LARGE, rank + 1.0), DType.FLOAT64)
        assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(PATIENCE)
        met.wait(PATIENCE)
        parts = [part.name for part in backend._parts]
        backend.close()
        registry.discard(made[rank], (), ShutDownError("done"))
        total = device.download(tensor).max()
        device.close()
        return backend.name, parts, total

    made, met = {}, threading.Barrier(3)
    first, second, third = in_threads(3, member)
    assert first == third == ("hierarchical", ["nccl", across, "nccl"], 6.0)
    assert second == ("hierarchical", ["nccl", "nccl"], 6.0)
