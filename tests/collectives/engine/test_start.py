"""Settings -> running engines."""

import functools
import os
import secrets
import threading

import numpy as np
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    HorovodInternalError,
    InvalidRequestError,
    PeerLostError,
    SettingsError,
    Timeouts,
    Topology,
    World,
)
from collectives.backends import registry
from collectives.backends.gloo import bootstrap
from collectives.engine import start
from collectives.handshake import search
from collectives.handshake.entries import Starts
from collectives.net.attempts import ConnectAttempt
from collectives.settings import Settings
from collectives.store.server import RendezvousServer
from tests.collectives.backends.members import Processes, in_threads
from tests.collectives.engine.job import PATIENCE, ones, outcome, run, total


@pytest.fixture
def launcher():
    """``launcher(rank, size, **changes)``: the world and the settings of a rank of one job."""
    secret = secrets.token_bytes(16)

    def launch(rank, size, round=0, rendezvous=None, **changes):
        topology = Topology(rank, size, rank, size, hosts=(), cores=0)
        world = World("test", round, topology, "node", rendezvous or ("127.0.0.1", server.port))
        timeouts = Timeouts(connect=PATIENCE, collective=PATIENCE)
        return world, Settings(**({"secret": secret, "timeouts": timeouts} | changes))

    with RendezvousServer(secret) as server:
        yield launch


CORES = len(os.sched_getaffinity(0))
LONG = Timeouts(connect=8 * PATIENCE, collective=8 * PATIENCE)
"""Longer than a test may take."""


def started(launched, body, **arguments):
    """``body(engine)`` between the start and the end of an engine."""
    engine = start.connect(*launched, **arguments)
    try:
        return body(engine)
    finally:
        engine.shutdown()


def test_a_world_of_one_needs_no_launcher():
    def body(engine):
        np.testing.assert_array_equal(run(engine, ones(engine)), ones(engine))
        return engine.topology

    assert started((World(host="alone"), Settings()), body) == Topology(hosts=("alone",), cores=CORES)


def test_ranks_find_each_other_and_know_where_they_are(launcher):
    def body(engine):
        np.testing.assert_array_equal(run(engine, ones(engine)), total(3))
        return engine.topology

    topologies = in_threads(3, lambda rank: started(launcher(rank, 3), body), PATIENCE)
    assert topologies == [Topology(rank, 3, rank, 3, 0, 1, ("node",) * 3, CORES) for rank in range(3)]


def test_process_sets_have_backends_of_their_own(launcher):
    def body(engine):
        rank, sets = engine.topology.rank, engine.process_sets
        sums = [run(engine, ones(engine), process_set=id)[0] for id in sets.ids() if rank in sets.ranks(id)]
        engine.barrier()
        return sums

    sets = [(0, 2), (1,)]
    results = in_threads(3, lambda rank: started(launcher(rank, 3), body, process_sets=sets), PATIENCE)
    assert results == [[6.0, 4.0], [6.0, 2.0], [6.0, 4.0]]


def test_a_job_can_start_again_in_the_same_world(launcher):
    def body(rank):
        starts = Starts()
        for _ in range(3):
            assert started(launcher(rank, 2), lambda engine: run(engine, ones(engine))[0], starts=starts) == 3.0

    in_threads(2, body, PATIENCE)


def test_a_newcomer_meets_survivors_in_the_round_that_both_were_given(launcher):
    """Ranks 0 and 1 go from round to round, with another third rank each time, which has not been in any before."""

    def body(number):
        starts = Starts()
        rounds = range(4) if number < 2 else [number - 2]
        return [
            started(launcher(min(number, 2), 3, round), lambda engine: run(engine, ones(engine))[0], starts=starts)
            for round in rounds
        ]

    assert in_threads(6, body, PATIENCE) == [[6.0] * 4] * 2 + [[6.0]] * 4


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_missed_starts_that_failed_finds_the_others(launcher, failing, monkeypatch):
    """One rank tries twice without the other, in vain; both are in the same world and come together then."""
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", PATIENCE)

    def body(rank):
        starts = Starts()
        for _ in range(2 if rank == failing else 0):
            with ConnectAttempt(0.1) as attempt:
                error = outcome(lambda: start.connect(*launcher(rank, 2), starts=starts, attempt=attempt))
            assert isinstance(error, CollectiveTimeoutError)
        ready.wait(PATIENCE)
        return [started(launcher(rank, 2), lambda engine: run(engine, ones(engine))[0], starts=starts) for _ in "ab"]

    ready = threading.Barrier(2)
    assert in_threads(2, body, PATIENCE) == [[3.0, 3.0]] * 2


def test_a_rank_of_an_earlier_round_is_told_the_current_one(launcher):
    def body(rank):
        if rank == 1:
            published.wait(PATIENCE)
            return outcome(lambda: start.connect(*launcher(1, 2, 3)))
        with ConnectAttempt(PATIENCE) as attempt:
            threading.Timer(0.05, published.set).start()
            late = threading.Thread(target=lambda: (told.wait(PATIENCE), attempt.abort(HorovodInternalError("enough"))))
            late.start()
            error = outcome(lambda: start.connect(*launcher(0, 2, 4), attempt=attempt))
            late.join(PATIENCE)
            return error

    def behind(rank):
        try:
            return body(rank)
        finally:
            if rank == 1:
                told.set()

    published, told = threading.Event(), threading.Event()
    first, second = in_threads(2, behind, PATIENCE)
    assert str(first) == "enough"
    assert type(second) is PeerLostError
    assert "rank 1 is in round 3 of job 'test', rank 0 in round 4 of job 'test'" in str(second)


@pytest.mark.parametrize("rank", [0, 1])
def test_another_thread_ends_the_wait_for_ranks_that_do_not_come(launcher, rank):
    with ConnectAttempt(PATIENCE) as attempt:
        aborting = threading.Timer(0.05, attempt.abort, [HorovodInternalError("the membership changed")])
        aborting.start()
        error = outcome(lambda: start.connect(*launcher(rank, 2), attempt=attempt))
        aborting.join(PATIENCE)
    assert (type(error), str(error)) == (HorovodInternalError, "the membership changed")


@pytest.mark.parametrize("sets", [[(0, 1)], [(0, 0)], [(0, 2)], [()]])
def test_bad_process_sets_are_refused_before_anything_starts(sets, launcher):
    with pytest.raises(InvalidRequestError):
        start.connect(*launcher(0, 2), process_sets=sets)


@pytest.mark.parametrize(
    ("changes", "sets", "text"),
    [
        ({"cpu_operations": "gloo"}, (), "HOROVOD_CPU_OPERATIONS is 'auto' on rank 0 and 'gloo' on rank 1; "),
        ({"cache_capacity": 0}, (), "HOROVOD_CACHE_CAPACITY is 'above 0' on rank 0 and '0' on rank 1; "),
        ({}, [(0,)], "the list of process sets is '[]' on rank 0 and '[[0]]' on rank 1; "),
    ],
    ids=["operations", "cache", "process sets"],
)
def test_what_must_be_the_same_everywhere_ends_the_start_of_all_with_one_text(launcher, changes, sets, text):
    def body(rank):
        if rank == 0:
            return outcome(lambda: start.connect(*launcher(0, 2)))
        return outcome(lambda: start.connect(*launcher(1, 2, **changes), process_sets=sets))

    one, other = in_threads(2, body, PATIENCE)
    assert type(one) is type(other) is SettingsError
    assert str(one) == str(other) == text + "it must be the same on all ranks"


def test_another_size_of_the_cache_or_of_fusion_is_no_matter(launcher):
    def body(rank):
        settings = launcher(rank, 2, cache_capacity=1 + rank, fusion_threshold=rank)
        return started(settings, lambda engine: run(engine, ones(engine))[0])

    assert in_threads(2, body, PATIENCE) == [3.0, 3.0]


def test_an_unreachable_rendezvous_is_named(launcher):
    with pytest.raises(SettingsError, match=r"HOROVOD_GLOO_RENDEZVOUS_ADDR is '192\.0\.2\.300'; this host cannot"):
        start.connect(*launcher(0, 2, rendezvous=("192.0.2.300", 1)))


def test_ranks_connect_by_ipv6():
    secret = secrets.token_bytes(16)

    def body(rank):
        world = World("test", 0, Topology(rank, 2, 0, 1, rank, 2, (), 0), f"host-{rank}", ("::1", server.port))
        return started((world, Settings(secret=secret)), lambda engine: run(engine, ones(engine))[0])

    try:
        server = RendezvousServer(secret, "::1")
        server.start()
    except SettingsError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        assert in_threads(2, body) == [3.0, 3.0]
    finally:
        server.stop()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("operations", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("moment", ["prepare", "connect"])
def test_a_rank_that_cannot_connect_its_backend_ends_the_start_of_all(
    launcher, monkeypatch, moment, operations, failing
):
    """With the reason of that rank, long before any timeout; at the latest in the first operation."""
    prepare = registry.prepare

    def fail(entrant):
        def connect(offers, attempt):
            raise HorovodInternalError("no memory")

        entrant.connect = connect
        return entrant

    def prepared(members, topology, *rest):
        if topology.rank != failing:
            return prepare(members, topology, *rest)
        if moment == "prepare":
            raise HorovodInternalError("no memory")
        return [fail(entrant) for entrant in prepare(members, topology, *rest)]

    def body(rank):
        launched = launcher(rank, 3, cpu_operations=operations, timeouts=LONG)
        return outcome(lambda: started(launched, lambda engine: run(engine, ones(engine))))

    monkeypatch.setattr(bootstrap, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(registry, "prepare", prepared)
    errors = in_threads(3, body)
    assert [str(error) for error in errors] == ["no memory"] * 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvd-engine")]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("operations", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize("moment", ["prepare", "connect"])
def test_a_rank_that_dies_before_its_backends_have_connected_is_named(moment, operations, victim):
    """A process is killed between hello and backends; the survivors raise it at once, at the latest in an operation."""
    secret = secrets.token_bytes(16)
    with RendezvousServer(secret) as server:
        body = functools.partial(_die_while_connecting, server.port, secret, moment, operations, victim)
        with Processes(3, body) as processes:
            assert processes.hear(victim) == "ready to die"
            processes.kill(victim)
            for rank in {0, 1, 2} - {victim}:
                kind, text, ranks = processes.hear(rank)
                assert kind == "PeerLostError", text
                assert victim in ranks, text


def _die_while_connecting(port, secret, moment, operations, victim, member):
    def stop(*_):
        member.tell("ready to die")
        threading.Event().wait()

    prepare = registry.prepare

    def prepared(*arguments):
        if moment == "prepare":
            stop()
        entrants = prepare(*arguments)
        for entrant in entrants:
            entrant.connect = stop
        return entrants

    if member.rank == victim:
        registry.prepare = prepared
    topology = Topology(member.rank, member.size, member.rank, member.size, hosts=(), cores=0)
    world = World("test", 0, topology, "node", ("127.0.0.1", port))
    settings = Settings(secret=secret, cpu_operations=operations, timeouts=LONG)
    error = outcome(lambda: started((world, settings), lambda engine: run(engine, ones(engine))))
    return type(error).__name__, str(error), getattr(error, "ranks", ())


@pytest.mark.parametrize(
    ("members", "asked", "chosen"),
    [
        ((1,), "auto", "single"),
        ((1,), "gloo", "single"),
        ((0, 1), "auto", "shm"),
        ((0, 1), "gloo", "gloo"),
        ((0, 1), "tcp", "tcp"),
        ((0, 2), "auto", "tcp"),
        ((0, 2), "gloo", "gloo"),
        ((0, 1), "shm", "shm"),
        ((0, 1, 2), "auto", "hierarchical"),
        ((0, 1, 2), "tcp", "hierarchical"),
        ((0, 1, 2), "gloo", "hierarchical"),
        ((0, 1), "pygloo", "pygloo"),
        ((0, 2), "pygloo", "pygloo"),
        ((0, 1, 2), "pygloo", "hierarchical"),
    ],
)
def test_the_backend_follows_the_hosts_and_the_wish(members, asked, chosen):
    settings = Settings(cpu_operations=asked)
    assert registry.choose(members, Topology(size=3, hosts=("a", "a", "b")), settings) == chosen


@pytest.mark.parametrize("allreduce", [None, True, False])
@pytest.mark.parametrize("allgather", [None, True, False])
def test_the_hierarchy_can_be_switched_off_in_parts(allreduce, allgather):
    settings = Settings(hierarchical_allreduce=allreduce, hierarchical_allgather=allgather)
    flat = allreduce is allgather is False
    assert registry.choose((0, 1, 2), Topology(size=3, hosts=("a", "a", "b")), settings) == (
        "tcp" if flat else "hierarchical"
    )
    assert registry.choose((0, 1), Topology(size=2, hosts=("a", "a")), settings) == "shm"


def test_shared_memory_does_not_reach_another_host():
    with pytest.raises(SettingsError, match=r"HOROVOD_CPU_OPERATIONS=shm, but the ranks \[0, 2\] are on 2 hosts"):
        registry.choose((0, 2), Topology(size=3, hosts=("a", "a", "b")), Settings(cpu_operations="shm"))


def test_rank_0_is_reached_at_the_interface_that_was_named():
    world = World(rendezvous=("192.0.2.1", 1))
    assert start.own_address(world, Settings(interface="lo")) == "127.0.0.1"
    with pytest.raises(SettingsError, match="HOROVOD_GLOO_IFACE is 'nowhere0'"):
        start.own_address(world, Settings(interface="nowhere0"))


def test_a_device_without_a_backend_is_named():
    with pytest.raises(SettingsError, match="no backend works on the memory of xpu; the devices are: cpu, cuda"):
        registry.choose((0, 1), Topology(size=2, hosts=("a", "a")), Settings(), "xpu")
    assert registry.choose((0, 1), Topology(size=2, hosts=("a", "a")), Settings(), "cuda") == "nccl"
