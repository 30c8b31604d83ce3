"""Process sets that are added while the engine runs: the members' addresses travel with the call itself."""

import functools
import os
import secrets
import subprocess
import sys
import threading

import pytest

from collectives.api import (
    HorovodInternalError,
    InvalidRequestError,
    MismatchError,
    Operation,
    PeerLostError,
    RefusedCallError,
    Request,
    ShutDownError,
    Timeouts,
    Topology,
    World,
)
from collectives.backends import registry
from collectives.controller.messages import Ready, Response, Run, decode, encode
from collectives.engine import start as bootstrap
from collectives.engine.engine import SetCalls
from collectives.engine.registration import Registration
from collectives.settings import Settings
from collectives.store.server import RendezvousServer
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, Caller, Job, ones, outcome, run, running, until
from tests.interrupts import interrupted

SIZE = 3


@pytest.fixture
def engines():
    """``engines(**settings)``: engines that are connected by real backends; the rendezvous server has gone already."""
    made = []

    def start(**settings):
        secret = secrets.token_bytes(16)
        chosen = Settings(secret=secret, timeouts=Timeouts(connect=3 * PATIENCE, collective=PATIENCE), **settings)

        def connect(rank):
            topology = Topology(rank, SIZE, rank, SIZE, hosts=(), cores=0)
            return bootstrap.connect(World("test", 0, topology, "node", ("127.0.0.1", server.port)), chosen)

        with RendezvousServer(secret) as server:
            made.extend(in_threads(SIZE, connect))  # which may import torch
        return made

    yield start
    in_threads(len(made), lambda rank: made[rank].shutdown(), PATIENCE)


def summed(engine, ids):
    """The sums of the ranks' numbers on each set that has this rank as a member, by set."""
    rank = engine.topology.rank
    return {id: run(engine, ones(engine), process_set=id)[0] for id in ids if rank in engine.process_sets.ranks(id)}


@pytest.mark.parametrize("operations", ["auto", "tcp", "gloo"])
def test_a_set_is_added_without_the_rendezvous(engines, operations):
    def body(engine):
        ids = [engine.add_process_set(ranks) for ranks in ([0, 2], [1], [1, 2])]
        first = summed(engine, ids)
        engine.remove_process_set(ids[0])
        again = engine.add_process_set([0, 1])
        return first, summed(engine, [again])

    made = engines(cpu_operations=operations)
    found = in_threads(SIZE, lambda rank: body(made[rank]), PATIENCE)
    assert found == [({1: 4.0}, {1: 3.0}), ({2: 2.0, 3: 5.0}, {1: 3.0}), ({1: 4.0, 3: 5.0}, {})]


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("operations", ["auto", "tcp", "gloo"])
def test_a_rank_that_cannot_prepare_for_a_set_ends_the_call_on_all_and_nothing_else(
    engines, operations, failing, monkeypatch
):
    made, prepare = engines(cpu_operations=operations), registry.prepare

    def prepared(members, topology, *rest):
        if topology.rank == failing and not healed.is_set():
            raise HorovodInternalError("no port")
        return prepare(members, topology, *rest)

    def body(rank):
        error = outcome(lambda: made[rank].add_process_set([0, 2]))
        healed.set()
        return error, summed(made[rank], [made[rank].add_process_set([0, 2])])

    monkeypatch.setattr(registry, "prepare", prepared)
    healed = threading.Event()
    found = in_threads(SIZE, body, PATIENCE)
    for rank, (error, _) in enumerate(found):
        assert type(error) is (HorovodInternalError if rank == failing else RefusedCallError)
        assert "no port" in str(error)
    assert [sums for _, sums in found] == [{1: 4.0}, {}, {1: 4.0}]


def test_sets_come_and_go_at_the_same_time(engines):
    """Two threads of each rank: one adds two sets, while the other removes the two of the round before."""
    made = engines()

    def change(index, added, removed):
        engine = made[index % SIZE]
        if index < SIZE:
            return [engine.add_process_set(ranks) for ranks in added]
        return [engine.remove_process_set(id) for id in removed]

    before = []
    for sets, sums in [([[0, 1], [1]], [[3.0], [3.0, 2.0], []]), ([[1, 2], [2]], [[], [5.0], [5.0, 3.0]])] * 3:
        first, *others = in_threads(2 * SIZE, functools.partial(change, added=sets, removed=before), PATIENCE)[:SIZE]
        assert others == [first] * 2
        assert in_threads(SIZE, lambda rank, ids=first: [*summed(made[rank], ids).values()], PATIENCE) == sums
        before = first


# The formations of the ranks, without sockets.


class Formations(Job):
    """A job that keeps every formation."""

    def __init__(self, *args, **kwargs):
        self.formations = []
        super().__init__(*args, **kwargs)

    def _form(self, rank, members):
        self.formations.append(super()._form(rank, members))
        return self.formations[-1]


def test_a_set_that_is_added_releases_what_the_ranks_prepared():
    job = Formations(3)
    job.run(lambda engine: engine.add_process_set([0, 1]))
    job.shutdown()
    assert [formation.closed for formation in job.formations] == [1, 1]


def test_a_set_that_the_ranks_disagree_about_releases_what_they_prepared():
    job = Formations(2)
    errors = job.outcomes(lambda engine: engine.add_process_set([engine.topology.rank]))
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert [formation.closed for formation in job.formations] == [1, 1]
    job.shutdown()


def test_a_call_that_waits_for_others_releases_what_it_prepared_at_the_end():
    job = Formations(3)
    caller = Caller(job.engines[0], body=lambda engine: engine.add_process_set([0, 1]))
    until(lambda: job.engines[0]._works)
    job.shutdown()
    assert isinstance(caller.result(), ShutDownError)
    assert [formation.closed for formation in job.formations] == [1]


def test_a_call_after_the_end_releases_what_it_prepared():
    job = Formations(3)
    job.shutdown()
    assert isinstance(outcome(lambda: job.engines[0].add_process_set([0, 1])), ShutDownError)
    assert [formation.closed for formation in job.formations] == [1]


def test_an_interrupt_at_any_line_of_the_call_releases_what_it_prepared():
    prepared, number = [], 0
    while (formations := formations_after_interrupt(number)) is not None:
        prepared += [formation for formation in formations if formation.prepared]
        number += 1
    assert len(prepared) > 5
    assert all(formation.closed for formation in prepared)


def formations_after_interrupt(number):
    """The formations of rank 0 whose call was interrupted at the n-th line, None if it has fewer lines."""
    job = Formations(2)
    other = Caller(job.engines[1], body=lambda engine: engine.add_process_set([0]))
    try:
        functions = SetCalls.add, SetCalls._prepare, SetCalls._run
        if interrupted(number, functions, lambda: job.engines[0].add_process_set([0])):
            return job.formations
        assert other.result() == 1
        return None
    finally:
        job.shutdown()


def test_a_rank_that_vanishes_while_others_wait_for_its_call_is_named():
    job = Formations(3)
    callers = [Caller(job.engines[rank], body=lambda engine: engine.add_process_set([0, 1])) for rank in (0, 1)]
    until(lambda: len(job.formations) == 2)
    job.vanish(2)
    for caller in callers:
        error = caller.result()
        assert isinstance(error, PeerLostError)
        assert error.ranks == (2,)
    job.shutdown()
    assert [formation.closed for formation in job.formations] == [1, 1]


def test_a_rank_without_preparation_is_an_error_of_the_engine():
    with running(3) as job:
        works = [Registration(Request("odd", Operation.ADD_PROCESS_SET, splits=(0, 1))) for _ in "abc"]
        for engine, work in zip(job.engines, works, strict=True):
            engine.submit_group([work])
        errors = [
            outcome(lambda rank=rank: job.engines[rank].synchronize(works[rank])) for rank in range(2)
        ]  # rank 2 is no member
        assert all("has not prepared for process set [0, 1]" in str(error) for error in errors)


def test_wrong_arguments_prepare_nothing():
    job = Formations(2)
    for engine in job.engines:
        with pytest.raises(InvalidRequestError):
            engine.add_process_set([0, 0])
    job.shutdown()
    assert job.formations == []


def test_offers_survive_the_wire_and_do_not_count_in_comparisons():
    request = Request("a", Operation.ADD_PROCESS_SET, splits=(0, 1), offer=b"\x00address")
    assert decode(encode(Ready((request,)))).requests[0].offer == b"\x00address"
    message = Run(((1,),), (Response(1, request, (4,), (b"one", b"")), Response(2, Request("b", Operation.BARRIER))))
    assert decode(encode(message)) == message
    assert decode(encode(message)).responses[0].offers == (b"one", b"")
    assert request == Request("a", Operation.ADD_PROCESS_SET, splits=(0, 1))
    assert request.changed(name="b").offer == b"\x00address"


END_WHILE_ADDING = """
import os, sys
sys.path.insert(0, os.getcwd())
from collectives.api import Topology
from collectives.backends.registry import prepare
from collectives.settings import Settings
topology = Topology(0, 2, 0, 2, hosts=("a", "a"), cores=1)
bootstrap, _ = prepare((0, 1), topology, Settings(cpu_operations="gloo"), "127.0.0.1")
"""


def test_a_gloo_set_that_waits_for_others_does_not_keep_the_process_from_ending():
    done = subprocess.run([sys.executable, "-c", END_WHILE_ADDING], cwd=os.getcwd(), timeout=PATIENCE * 3, check=False)
    assert done.returncode == 0
