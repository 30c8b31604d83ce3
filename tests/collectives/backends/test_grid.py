"""Large groups over TCP work in blocks: each member is connected to few others."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import DType, Parameters, PeerLostError, ReduceOp, Topology
from collectives.backends import base, registry
from collectives.backends.base import Bootstrap, Group
from collectives.backends.hierarchical import backend, grid
from collectives.backends.hierarchical.backend import HierarchicalBackend
from collectives.backends.hierarchical.grid import GridBackend, blocks
from collectives.backends.tcp import TcpBackend
from collectives.backends.tcp.sparse import SparseTransport
from collectives.kernels.reduction import reduction
from collectives.net.interfaces import LOOPBACK
from collectives.settings import Settings
from collectives.store.memory import MemoryStore
from tests.collectives.backends import group_cases, offers
from tests.collectives.backends.matrix import checks, reduce_until_error, run_matrix, shorten
from tests.collectives.backends.members import Member, Processes
from tests.collectives.backends.tcp.test_random_rounds import ROUNDS, Rounds, plan_of
from tests.collectives.backends.tcp.votes import ignore, nothing, vote_of

PATIENCE = 20.0
SHAPES = {"2 blocks of 3": (6, 4), "blocks of 2 and 3": (5, 4), "blocks of blocks": (5, 2)}
EACH = pytest.mark.parametrize(("size", "most"), SHAPES.values(), ids=SHAPES)
HOSTS = "abcdefghi"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of more than four are large."""
    monkeypatch.setattr(base, "MOST_LINKED", 4)


def bootstrap_of(group: Group, timeout: float = PATIENCE, address: str = LOOPBACK, **settings: object) -> Bootstrap:
    """Each member is on a host of its own, without a core of its own."""
    alone = Group(group.ranks, group.position, tuple(HOSTS[: group.size]))
    topology = Topology(alone.ranks[alone.position], alone.size, local_size=2, hosts=alone.hosts, cores=1)
    chosen = Settings(**settings)
    chosen = replace(chosen, timeouts=replace(chosen.timeouts, collective=timeout))
    return registry.prepare(alone.ranks, topology, chosen, address)[0]


def with_members(size, body, timeout=PATIENCE, **settings):
    group_cases.with_backends(partial(bootstrap_of, **settings), size, body, timeout)


def parts_of(member: HierarchicalBackend) -> list[TcpBackend]:
    """The backends at the end of all levels."""
    found = []
    for part in member._parts:
        found += parts_of(part) if isinstance(part, HierarchicalBackend) else [part]
    return found


def partners(member: HierarchicalBackend) -> set[int]:
    """The ranks to which ``member`` is connected."""
    return {part.group.ranks[position] for part in parts_of(member) for position in part._tcp._links}


# Blocks.


@given(size=st.integers(2, 3000), most=st.integers(2, 64))
def test_blocks_are_as_long_as_each_other_but_for_one(size, most):
    found = blocks(size, most)
    assert [position for block in found for position in block] == list(range(size))
    lengths = {len(block) for block in found}
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(found) < size, "a column is shorter than the group"


@pytest.mark.parametrize(
    ("size", "lengths"), [(65, {5: 13}), (67, {8: 5, 9: 3}), (512, {16: 32}), (1250, {25: 50}), (10_000, {50: 200})]
)
def test_blocks_and_columns_have_about_the_same_length(size, lengths):
    assert Counter(map(len, blocks(size, 64))) == lengths


# Operations.


@EACH
def test_matrix(size, most, monkeypatch):
    """With limits that lie among the sizes of the matrix."""
    monkeypatch.setattr(base, "MOST_LINKED", most)
    shorten(monkeypatch)
    monkeypatch.setattr(backend, "SMALL", 16)
    monkeypatch.setattr(backend, "MOST_KEPT", 1 << 15)

    def body(member):
        assert isinstance(member, GridBackend)
        member.adopt(Parameters(pipeline_piece=1 << 16))
        run_matrix(member, member.rank, size, roundings=4)

    with_members(size, body)


def test_processes():
    """One launch for all that needs real processes, because starting them takes longest."""
    with Processes(6, _work_in_a_process) as processes:
        assert processes.results() == ["done"] * 6


def _work_in_a_process(member: Member) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "MOST_LINKED", 4)
        shorten(patch)
        patch.setattr(group_cases, "run_matrix", partial(run_matrix, roundings=2))
        return group_cases.work_in_a_process(bootstrap_of, member)


def test_stages_stay_on_when_those_of_hosts_are_off():
    def body(member):
        member.adopt(Parameters(hierarchical_allreduce=False, hierarchical_allgather=False))
        values, gathered = np.ones(8, np.uint8), np.empty(48, np.uint8)
        member.allreduce_arrays([values], [values], reduction(DType.UINT8, ReduceOp.SUM))
        member.allgather_bytes([values], [gathered], [8] * 6)
        assert (gathered == 6).all()
        assert not member._flat._tcp._links

    with_members(6, body)


@pytest.mark.parametrize("size", [5, 6])
def test_a_member_is_connected_to_its_block_and_its_column(size):
    """All operations but an alltoall go that way, and an alltoall connects only those that exchange data."""

    def body(member):
        near = {rank for block in grid.blocks(size, 4) if member.rank in block for rank in block}
        place = sorted(near).index(member.rank)
        column = {block[place] for block in grid.blocks(size, 4) if len(block) > place} if place < size // 2 else set()
        expected = (near | column) - {member.rank}
        values, counts = np.ones(10_000), [10_000] + [0] * (size - 1)
        member.barrier()
        member.allreduce_arrays([values], [values], reduction(DType.FLOAT64, ReduceOp.SUM))
        assert (values == size).all()
        member.reducescatter_arrays(
            [values], [values[: counts[member.rank]]], counts, reduction(DType.FLOAT64, ReduceOp.MAX)
        )
        member.broadcast_bytes(*[values.view(np.uint8)] * 2, size - 1)
        assert partners(member) == expected
        other = size - 1 - member.rank
        sent, received = np.full(3, member.rank, np.uint8), np.empty(3, np.uint8)
        parts = [3 * (rank == other) for rank in range(size)]
        member.alltoall_bytes(*((sent, received) if other != member.rank else (sent, sent)), parts, parts)
        assert partners(member) == expected | ({other} - {member.rank})
        assert other == member.rank or (received == other).all()

    with_members(size, body)


# Votes.


@EACH
def test_operations_run_on_all_members_or_on_none(size, most, monkeypatch):
    def body(member):
        rounds = Rounds(member, noticed)
        for number, plan in enumerate(plans):
            rounds.take_part(number, plan._replace(afterwards=False))
            if not plan.runs:
                all_left.wait(PATIENCE)  # nobody enters the next round before
        assert vote_of(member).attempt(7, nothing, ignore, nothing)
        all_left.wait(PATIENCE)

    monkeypatch.setattr(base, "MOST_LINKED", most)
    random, all_left = np.random.default_rng(size), threading.Barrier(size)
    plans = [plan_of(random, size) for _ in range(ROUNDS)]
    noticed = [threading.Event() for _ in plans]
    with_members(size, body)


@pytest.mark.parametrize("late", range(6))
def test_the_first_member_learns_of_the_block_of_a_late_one(late):
    """Members know of the late ones of their block; the others get none, as rank 0 asks who waits."""

    def body(member):
        def waiting(absent):
            told[member.rank] = absent
            if told.get(observer) and late in told[observer]:
                noticed.set()

        if member.rank == late:
            assert noticed.wait(PATIENCE), told
        assert vote_of(member).attempt(7, nothing, waiting, nothing)

    observer, told, noticed = int(late == 0), {}, threading.Event()
    with_members(6, body)


# Losses.


@pytest.mark.parametrize("lost", range(6))
@pytest.mark.parametrize("doing", ["voting", "reducing"])
def test_a_lost_member_ends_the_work_of_all(lost, doing):
    """It is the first or another member of the first or another block; each member names somebody."""

    def work(member):
        if doing == "voting":
            vote_of(member).attempt(7, nothing, ignore, pytest.fail)
        raise reduce_until_error(member, 1000, PATIENCE)

    def body(member):
        if member.rank == lost:
            everybody.wait(PATIENCE)
            for part in parts_of(member):
                part._tcp._pump._shut_down()
            return
        everybody.wait(PATIENCE)
        with pytest.raises(PeerLostError) as caught:
            work(member)
        named[member.rank] = caught.value.ranks
        member.abort(caught.value)

    everybody, named = threading.Barrier(6), {}
    with_members(6, body)
    assert len(named) == 5
    near = {rank for block in blocks(6, 4) if lost in block for rank in block}
    assert (lost,) in [named[rank] for rank in near - {lost}], named


def test_a_killed_member():
    with Processes(6, _reduce_in_a_process) as processes:
        for rank in range(6):
            assert processes.hear(rank) == "reducing"
        processes.kill(4)
        assert [processes.hear(rank) for rank in (0, 1, 2, 3, 5)] == ["PeerLostError"] * 5


def _reduce_in_a_process(member: Member) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "MOST_LINKED", 4)
        return group_cases.reduce_in_a_process(bootstrap_of, member)


def test_an_abort_ends_a_vote_and_reaches_all():
    def body(member):
        if member.rank == 3:
            everybody.wait(PATIENCE)
            member.abort(RuntimeError("told to stop"))
            return
        threading.Timer(0.0, everybody.wait).start()
        with pytest.raises(PeerLostError):
            vote_of(member).attempt(7, nothing, ignore, pytest.fail)
        member.abort(RuntimeError("over"))

    everybody = threading.Barrier(6)
    with_members(6, body)


def test_the_hosts_of_a_hierarchy_work_in_blocks_and_its_flat_backend_connects_later(monkeypatch):
    """Five hosts, one of them with two ranks."""

    def connect(rank: int) -> HierarchicalBackend:
        topology = Topology(rank, 6, hosts=tuple("aabcde"), cores=2)
        bootstrap = registry.prepare(range(6), topology, Settings(), LOOPBACK)[0]
        return offers.meet(bootstrap, store, PATIENCE)

    def body(member):
        assert not isinstance(member, GridBackend)
        assert isinstance(member._cross, GridBackend) or member._cross is None
        assert isinstance(member._flat._tcp, SparseTransport)
        values = np.ones(100_000)
        assert vote_of(member).attempt(
            7,
            lambda: member.allreduce_arrays([values], [values], reduction(DType.FLOAT64, ReduceOp.SUM)),
            ignore,
            nothing,
        )
        assert (values == 6).all()
        values[:] = 1.0
        counts = [0, 1, 2, 3, 4, 5]
        own = np.empty(counts[member.rank])
        member.reducescatter_arrays([values[:15]], [own], counts, reduction(DType.FLOAT64, ReduceOp.SUM))
        assert (own == 6).all()
        assert not member._flat._tcp._links
        for name in ("average", "alltoall"):
            checks()[name](member)
        assert sorted(member._flat._tcp._links) == member._flat.group.others

    shorten(monkeypatch)
    store = MemoryStore()
    offers.with_backends(6, connect, body)
