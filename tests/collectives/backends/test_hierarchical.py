from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    HorovodInternalError,
    Parameters,
    PeerLostError,
    ReduceOp,
    Topology,
)
from collectives.backends import registry
from collectives.backends.base import Group
from collectives.backends.hierarchical import backend
from collectives.backends.hierarchical.backend import HierarchicalBackend
from collectives.backends.single import SingleBackend
from collectives.kernels.reduction import reduction
from collectives.settings import Settings
from collectives.store.memory import PrefixStore
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix, shorten
from tests.collectives.backends.members import Member, Processes, group_of, in_threads
from tests.collectives.backends.offers import meet

HOSTS = {"2+2": "aabb", "3+1": "aaab", "1+2+3": "abbccc", "interleaved": "ababb"}
TIMEOUT = 20.0


class Counting(InprocBackend):
    """Counts its calls and, of its own allgathers and allreduces, the bytes."""

    def __init__(self, group: Group, shared: InprocGroup) -> None:
        super().__init__(group, shared, TIMEOUT)
        self.calls: Counter[str] = Counter()

    def _exchange(self, call: tuple[object, ...], payload: object) -> list[object]:
        self.calls[str(call[0])] += 1
        self.calls["bytes"] += sum(array.nbytes for array in payload) if isinstance(payload, list) else 0
        self.calls["bytes"] += payload.nbytes if isinstance(payload, np.ndarray) else 0
        return super()._exchange(call, payload)


class Hosts:
    """Hosts of threads: ``hosts`` has a letter for each member, its host."""

    def __init__(self, hosts: str) -> None:
        self._letters = hosts
        self.size = len(hosts)
        self._hosts = group_of(self.size, 0, hosts).by_host()
        self._local = [InprocGroup(len(members)) for members in self._hosts]
        self._cross = [InprocGroup(len(self._hosts)) for _ in range(min(map(len, self._hosts)))]
        self._flat = InprocGroup(self.size)

    def member(self, rank: int, **parameters: Any) -> HierarchicalBackend:
        group = group_of(self.size, rank, self._letters)
        host = next(index for index, members in enumerate(self._hosts) if rank in members)
        place, local = self._hosts[host].index(rank), group.part(self._hosts[host])
        cross = None
        if place < len(self._cross):
            cross = Counting(group.part([members[place] for members in self._hosts]), self._cross[place])
        return HierarchicalBackend(
            group,
            SingleBackend(local) if local.size == 1 else Counting(local, self._local[host]),
            cross,
            Counting(group, self._flat),
            Parameters(**parameters),
        )


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_matrix(hosts, monkeypatch):
    """With limits that lie among the sizes of the matrix."""
    shorten(monkeypatch)
    monkeypatch.setattr(backend, "SMALL", 16)

    def body(rank):
        with closing(group.member(rank, pipeline_piece=1 << 14)) as backend:
            run_matrix(backend, rank, group.size, roundings=2)

    group = Hosts(hosts)
    in_threads(group.size, body)


def test_each_byte_crosses_the_network_once():
    """Columns share what crosses, and nothing goes through the flat backend."""

    def body(rank):
        backend = group.member(rank)
        values = np.ones(count, np.float32)
        backend.allreduce_arrays([values], [values], reduction(DType.FLOAT32, ReduceOp.SUM))
        reduced = backend._cross.calls["bytes"]
        result = np.empty(4 * values.nbytes, np.uint8)
        backend.allgather_bytes([values.view(np.uint8)], [result], [values.nbytes] * 4)
        return reduced, backend._cross.calls["bytes"] - reduced, backend._flat.calls["bytes"]

    group, count = Hosts(HOSTS["2+2"]), 1 << 16
    nbytes = 4 * count
    assert in_threads(4, body) == [(nbytes // 2, nbytes, 0)] * 4


@pytest.mark.parametrize(
    ("hosts", "crossing"), [("aabb", [12001, 2000] * 2), ("abba", [5000, 5000, 9001, 9001]), ("aaab", None)]
)
def test_a_reducescatter_crosses_once_where_each_member_is_in_a_column(hosts, crossing):
    """Unequal parts, in place, with a scale at both ends; a member may get nothing."""

    def body(rank):
        backend = group.member(rank)
        values = np.arange(total, dtype=np.float64) + rank
        own = values[sum(counts[:rank]) :][: counts[rank]]
        backend.reducescatter_arrays([values], [own], counts, reduction(DType.FLOAT64, ReduceOp.SUM, 2.0, 0.5))
        cross = backend._cross.calls if backend._cross else Counter()
        return own.copy(), cross["bytes"], backend._flat.calls["reducescatter"]

    group, counts = Hosts(hosts), [5000, 0, 7001, 2000]
    total = sum(counts)
    ranks = sum(range(group.size))
    found = in_threads(group.size, body)
    expected = np.split(np.arange(total) * float(group.size) + ranks, np.cumsum(counts)[:-1])
    for (own, _, _), whole in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, whole)
    if crossing is None:
        assert [flat for _, _, flat in found] == [1] * group.size
    else:
        assert [(nbytes // 8, flat) for _, nbytes, flat in found] == [(count, 0) for count in crossing]


def test_few_bytes_cross_in_one_column():
    def body(rank):
        backend = group.member(rank)
        values = np.ones(8, np.float32)
        backend.allreduce_arrays([values], [values], reduction(DType.FLOAT32, ReduceOp.SUM))
        return backend._cross.calls["allreduce"]

    group = Hosts(HOSTS["2+2"])
    assert in_threads(4, body) == [1, 0, 1, 0]


@given(count=st.integers(0, 5000), step=st.integers(1, 2000))
def test_pieces_are_short_at_both_ends_and_add_up(count, step):
    lengths = backend._lengths(count, step)
    assert sum(lengths) == count
    assert all(0 < length <= step for length in lengths)
    if step >= 4 and count >= step + 2 * (step // 4):
        assert lengths[0] == lengths[-1] == step // 4
    else:
        assert lengths == backend._cut(count, step)


@pytest.mark.parametrize("operation", ["allreduce", "allgather"])
def test_each_of_the_two_can_be_switched_off(operation):
    def body(rank):
        backend = group.member(rank)
        backend.adopt(Parameters(**{f"hierarchical_{operation}": False}))
        values, result = np.ones(8, np.uint8), np.empty(32, np.uint8)
        backend.allreduce_arrays([values], [values], reduction(DType.UINT8, ReduceOp.SUM))
        backend.allgather_bytes([values], [result], [8] * 4)
        return {name for name in backend._flat.calls if name != "bytes"}

    group = Hosts(HOSTS["2+2"])
    assert in_threads(4, body) == [{operation}] * 4


@pytest.mark.parametrize("victim", [0, 4], ids=["across", "inside"])
@pytest.mark.parametrize("length", [8, 1 << 20], ids=["piece", "pipeline"])
def test_an_abort_reaches_the_part_that_waits_and_all_others(victim, length):
    with closing(Hosts(HOSTS["1+2+3"]).member(victim)) as backend:
        abort_from_thread(backend, np.ones(length, np.float32))
        for call in (backend.barrier, lambda: backend.alltoall_bytes(*[np.ones(6, np.uint8)] * 2, [1] * 6, [1] * 6)):
            with pytest.raises(HorovodInternalError, match="told to stop"):
                call()


@pytest.mark.parametrize("length", [8, 1 << 20], ids=["piece", "pipeline"])
@pytest.mark.parametrize("victim", [0, 2, 5])
def test_who_fails_in_one_part_leaves_all(victim, length):
    """The members that wait for a failed one elsewhere learn of it, too."""

    def body(rank):
        with closing(group.member(rank)) as backend:
            values = np.ones(length, np.float32)
            backend.allreduce_arrays([values], [values], reduction(DType.FLOAT32, ReduceOp.SUM))
            if rank == victim:
                backend.abort(HorovodInternalError("told to stop"))
            else:
                assert isinstance(reduce_until_error(backend, length, TIMEOUT / 2), PeerLostError)

    group = Hosts(HOSTS["1+2+3"])
    in_threads(6, body)


def test_a_timeout_across_the_hosts_names_all_ranks_of_the_late_host():
    """Rank 3 does not come; rank 2, which carries the column of rank 0, waits for it."""

    def body(rank):
        backend = group.member(rank)
        backend._cross._timeout = 0.1
        if rank == 2:
            finished.wait(TIMEOUT)
            backend.abort(HorovodInternalError("the end"))
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="at least one of ranks 2, 3 on host 'b'") as caught:
                backend.barrier()
            assert caught.value.ranks == (2, 3)
            finished.set()
        elif rank == 1:
            with pytest.raises(PeerLostError):
                backend.barrier()

    group, finished = Hosts(HOSTS["2+2"]), threading.Event()
    in_threads(3, body)


def test_processes_of_two_hosts():
    """Shared memory inside, Gloo between: what a process set of two hosts gets."""
    with Processes(4, _work_in_a_process) as processes:
        assert processes.results() == ["done"] * 4


def _work_in_a_process(member: Member) -> str:
    backend = _connect(member, "matrix")
    assert [part.name for part in backend._parts] == ["shm", "tcp", "tcp"]
    run_matrix(backend, member.rank, member.size, roundings=2)
    member.meet_others("matrix-done")
    backend.close()
    backend = _connect(member, "gloo", cpu_operations="gloo")
    assert [part.name for part in backend._parts] == ["gloo"] * 3
    backend.barrier()
    member.meet_others("barrier-done")
    backend.close()
    return "done"


def _connect(member: Member, name: str, **settings: str) -> HierarchicalBackend:
    topology, store = Topology(member.rank, member.size, hosts=tuple("aabb")), PrefixStore(member.store, name)
    bootstrap, _ = registry.prepare(range(member.size), topology, Settings(**settings), "127.0.0.1")
    return meet(bootstrap, store, 30.0)
