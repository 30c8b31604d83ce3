"""Settings -> running engines."""

import os
import secrets
import threading

import numpy as np
import pytest

from collectives.api import HorovodInternalError, InvalidRequestError, SettingsError, Timeouts, Topology
from collectives.backends import table
from collectives.engine import bootstrap
from collectives.rendezvous.server import RendezvousServer
from collectives.settings import Settings
from tests.backends.members import in_threads
from tests.collectives.job import PATIENCE, ones, outcome, run, total


@pytest.fixture
def launcher():
    """``launcher(rank, size, **changes)``: the settings of a rank of one job."""
    secret = secrets.token_bytes(16)

    def settings(rank, size, **changes):
        usual = {
            "rank": rank,
            "size": size,
            "local_rank": rank,
            "local_size": size,
            "hostname": "node",
            "rendezvous_address": "127.0.0.1",
            "rendezvous_port": server.port,
            "secret": secret,
            "timeouts": Timeouts(connect=PATIENCE, collective=PATIENCE),
        }
        return Settings(**(usual | changes))

    with RendezvousServer(secret) as server:
        yield settings


CORES = len(os.sched_getaffinity(0))


def started(settings, body, **arguments):
    """``body(engine)`` between the start and the end of an engine."""
    engine = bootstrap.start(settings, **arguments)
    try:
        return body(engine)
    finally:
        engine.shutdown()


def test_a_world_of_one_needs_no_launcher():
    def body(engine):
        np.testing.assert_array_equal(run(engine, ones(engine)), ones(engine))
        return engine.topology

    assert started(Settings(hostname="alone"), body) == Topology(hosts=("alone",), cores=CORES)


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


def test_a_job_can_start_again_at_the_same_rendezvous(launcher):
    def body(rank):
        for generation in range(3):
            assert started(launcher(rank, 2), lambda engine: run(engine, ones(engine))[0], generation=generation) == 3.0

    in_threads(2, body, PATIENCE)


@pytest.mark.parametrize("sets", [[(0, 1)], [(0, 0)], [(0, 2)], [()]])
def test_bad_process_sets_are_refused_before_anything_starts(sets, launcher):
    with pytest.raises(InvalidRequestError):
        bootstrap.start(launcher(0, 2), process_sets=sets)


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
            return outcome(lambda: bootstrap.start(launcher(0, 2)))
        return outcome(lambda: bootstrap.start(launcher(1, 2, **changes), process_sets=sets))

    one, other = in_threads(2, body, PATIENCE)
    assert type(one) is type(other) is SettingsError
    assert str(one) == str(other) == text + "it must be the same on all ranks"


def test_another_size_of_the_cache_or_of_fusion_is_no_matter(launcher):
    def body(rank):
        settings = launcher(rank, 2, cache_capacity=1 + rank, fusion_threshold=rank)
        return started(settings, lambda engine: run(engine, ones(engine))[0])

    assert in_threads(2, body, PATIENCE) == [3.0, 3.0]


def test_an_unreachable_rendezvous_is_named(launcher):
    with pytest.raises(SettingsError, match="HOROVOD_GLOO_RENDEZVOUS_ADDR is '::1'; this host cannot reach it"):
        bootstrap.start(launcher(0, 2, rendezvous_address="::1"))


def test_a_rank_that_cannot_start_its_backend_ends_the_start_of_all(launcher, monkeypatch):
    """Rank 1 fails after all have connected; nobody is left waiting and nothing is left open."""
    connect = table.connect

    def fail_on_rank_1(members, topology, *rest):
        if topology.rank == 1:
            raise HorovodInternalError("no memory")
        return connect(members, topology, *rest)

    def body(rank):
        quick = Timeouts(connect=PATIENCE, collective=0.3)
        return outcome(lambda: bootstrap.start(launcher(rank, 2, timeouts=quick)))

    monkeypatch.setattr(table, "connect", fail_on_rank_1)
    errors = in_threads(2, body, PATIENCE)
    assert str(errors[1]) == "no memory"
    assert isinstance(errors[0], HorovodInternalError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvd-engine")]


@pytest.mark.parametrize(
    ("members", "asked", "chosen"),
    [
        ((1,), "auto", "single"),
        ((1,), "gloo", "single"),
        ((0, 1), "auto", "shm"),
        ((0, 1), "gloo", "gloo"),
        ((0, 2), "auto", "gloo"),
        ((0, 1), "shm", "shm"),
        ((0, 1, 2), "auto", "hierarchical"),
        ((0, 1, 2), "gloo", "hierarchical"),
    ],
)
def test_the_backend_follows_the_hosts_and_the_wish(members, asked, chosen):
    settings = Settings(cpu_operations=asked)
    assert table.choose(members, Topology(size=3, hosts=("a", "a", "b")), settings) == chosen


@pytest.mark.parametrize("allreduce", [None, True, False])
@pytest.mark.parametrize("allgather", [None, True, False])
def test_the_hierarchy_can_be_switched_off_in_parts(allreduce, allgather):
    settings = Settings(hierarchical_allreduce=allreduce, hierarchical_allgather=allgather)
    flat = allreduce is allgather is False
    assert table.choose((0, 1, 2), Topology(size=3, hosts=("a", "a", "b")), settings) == (
        "gloo" if flat else "hierarchical"
    )
    assert table.choose((0, 1), Topology(size=2, hosts=("a", "a")), settings) == "shm"


def test_shared_memory_does_not_reach_another_host():
    with pytest.raises(SettingsError, match=r"HOROVOD_CPU_OPERATIONS=shm, but the ranks \[0, 2\] are on 2 hosts"):
        table.choose((0, 2), Topology(size=3, hosts=("a", "a", "b")), Settings(cpu_operations="shm"))


def test_rank_0_is_reached_at_the_interface_that_was_named():
    assert bootstrap._own_address(Settings(interface="lo", rendezvous_address="192.0.2.1")) == "127.0.0.1"
    with pytest.raises(SettingsError, match="HOROVOD_GLOO_IFACE is 'nowhere0'"):
        bootstrap._own_address(Settings(interface="nowhere0", rendezvous_address="127.0.0.1"))
