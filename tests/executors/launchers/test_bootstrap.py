"""Ranks find one another without a launcher of ours: threads here, whose hosts are names."""

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError
from collectives.net.interfaces import LOOPBACK
from collectives.settings import Settings, world_from_environment
from collectives.store import client
from collectives.store.client import RendezvousClient
from collectives.store.memory import MemoryStore
from executors.job import host
from executors.launchers import bootstrap, known_ports
from executors.launchers.bootstrap import join
from executors.launchers.known_ports import KnownPorts, Trust, ports_of
from executors.launchers.place import Farewell, Place

SECONDS = 60.0


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HOROVOD_SECRET_KEY", raising=False)


@pytest.fixture
def job(request):
    return f"job of {request.node.nodeid}"


def place(job, rank, size, node="", rendezvous=None):
    return Place("srun", "N", rank, size, job, rendezvous or KnownPorts.on_this_host(ports_of({}, job)), node)


def joined(places, seconds=SECONDS):
    """The variables of each rank, or the error that it got."""

    farewells = {each.rank: Farewell() for each in places}

    def body(each):
        try:
            return join(each, seconds, farewells[each.rank])
        except (SettingsError, HorovodInternalError) as error:
            return error

    with ThreadPoolExecutor(len(places)) as pool:
        results = list(pool.map(body, places))
    for result in results:
        if not isinstance(result, Exception):
            result.close()
    for farewell in farewells.values():
        farewell.end()
    return [result if isinstance(result, Exception) else result.environment for result in results]


def test_ranks_of_two_hosts_in_turn(job):
    environments = joined([place(job, rank, 5, "abaab"[rank]) for rank in range(5)])
    worlds = [world_from_environment(environment) for environment in environments]
    numbers = [(w.topology.rank, w.topology.local_rank, w.topology.local_size, w.topology.cross_rank) for w in worlds]
    assert numbers == [(0, 0, 3, 0), (1, 0, 2, 1), (2, 1, 3, 0), (3, 2, 3, 0), (4, 1, 2, 1)]
    assert [w.topology.cross_size for w in worlds] == [2, 2, 2, 1, 2]
    assert [w.host == worlds[0].host for w in worlds] == [True, False, True, True, False]
    assert len({(w.job, w.rendezvous) for w in worlds}) == 1
    assert len({Settings.from_environment(environment).secret for environment in environments}) == 1


def test_containers_of_one_node_share_its_local_ranks(job, monkeypatch):
    """Each thread here is a container: the host is another one whenever it is asked for."""
    numbers = itertools.count()
    monkeypatch.setattr(host, "identity", lambda: f"container-{next(numbers)}")
    for nodes in ("aabb", ["", "", "", ""]):
        environments = joined([place(job, rank, 4, nodes[rank]) for rank in range(4)])
        worlds = [world_from_environment(environment) for environment in environments]
        assert len({world.host for world in worlds}) == 4
        assert [world.topology.local_rank for world in worlds] == ([0, 1, 0, 1] if nodes[0] else [0, 1, 2, 3])


def listening(caplog):
    """The ports on which the servers of the rendezvous and of the job have listened."""
    return [record.args[1] for record in caplog.records if "listens on" in record.message]


def test_a_port_that_is_taken_is_passed_over(job, caplog, monkeypatch):
    monkeypatch.setattr(client, "_ANSWER_GRACE", 1.0)  # the other program is silent
    caplog.set_level("INFO", "collectives.store")
    first, second, *_ = ports_of({}, job)
    with socket.create_server(("127.0.0.1", first)):
        joined([place(job, rank, 2) for rank in range(2)])
    assert listening(caplog)[0] == second


def test_the_server_of_another_job_is_passed_over(job, caplog):
    caplog.set_level("INFO", "collectives.store")
    rendezvous = KnownPorts.on_this_host(ports_of({}, job))
    led = rendezvous.lead("another job", SECONDS)
    try:
        joined([place(job, rank, 2, rendezvous=rendezvous) for rank in range(2)])
    finally:
        led.server.stop()
    assert listening(caplog)[1] == rendezvous.ports[1]


def test_nothing_of_the_rendezvous_is_left_when_all_ranks_have_come(job):
    """Its secret may stay where others can read it; that of the job is another one."""
    rendezvous = KnownPorts.on_this_host(ports_of({}, job))
    places = [place(job, rank, 2, rendezvous=rendezvous) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(join, places, [SECONDS] * 2, [Farewell(), Farewell()]))
    try:
        with socket.create_server((LOOPBACK, rendezvous.ports[0])):
            pass
        settings = [Settings.from_environment(result.environment) for result in results]
        assert settings[0].secret == settings[1].secret != rendezvous._secret(job).key
        port = int(results[0].environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        with pytest.raises(SettingsError, match=r"not to be trusted|signature is wrong"):
            RendezvousClient(LOOPBACK, port, rendezvous._secret(job).key, 5.0).get("world", 0.0)
        with pytest.raises(CollectiveTimeoutError):
            RendezvousClient(LOOPBACK, port, settings[0].secret, 5.0).get("world", 0.0)
    finally:
        for result in results:
            result.close()


def test_all_ports_are_taken(job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"rank 0 cannot listen on any of the ports {port}; set HOROVOD_GLOO_"):
            join(place(job, 0, 2, rendezvous=KnownPorts(("127.0.0.1",), (port,), Trust.USER)), SECONDS, Farewell())


MISSING = "of 3 ranks that srun started, rank 1 did not come within 0.5 s"


def failed(each, seconds, farewell):
    with pytest.raises(CollectiveTimeoutError) as caught:
        join(each, seconds, farewell)
    return str(caught.value)


@pytest.fixture
def farewell():
    """The reason that rank 0 serves after a rendezvous of three ranks: rank 1 did not come in time."""
    one = Farewell()
    yield one
    one.end()


@pytest.fixture
def without_rank_1(job, farewell):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(failed, place(job, 0, 3), 0.5, farewell)
        third = pool.submit(failed, place(job, 2, 3), SECONDS, Farewell())
        return first.result(SECONDS), third.result(SECONDS)


def test_ranks_that_do_not_come_are_named_to_those_that_do(without_rank_1):
    assert [text.startswith(MISSING) for text in without_rank_1] == [True, True]


def test_a_late_rank_hears_the_same_reason_once(job, without_rank_1):
    late = place(job, 1, 3)
    assert failed(late, SECONDS, Farewell()) == without_rank_1[0]
    assert failed(late, 0.1, Farewell()) == without_rank_1[0]  # of the next rendezvous, which has not begun


def test_a_rank_that_starts_again_after_all_have_come_hears_that(job):
    """Rank 0 serves the rendezvous for as long as another rank still reads the world."""
    led = KnownPorts.on_this_host(ports_of({}, job)).lead(job, SECONDS)
    led.server.store.set_all({"world": b"{}", "read/1": b""})
    try:
        assert failed(place(job, 1, 3), 0.1, Farewell()).startswith("rank 1 of this job of srun has started twice, but")
    finally:
        led.server.stop()


class Repeated:
    """A rendezvous, and whether a rank has looked for it again."""

    def __init__(self, rendezvous):
        self._rendezvous, self._calls = rendezvous, 0
        self.again = threading.Event()

    def follow(self, job, seconds):
        self._calls += 1
        if self._calls > 1:
            self.again.set()
        return self._rendezvous.follow(job, seconds)


def test_after_a_rendezvous_that_failed_all_ranks_may_meet(job, without_rank_1, farewell):
    """Rank 2, which knows the reason, and is earlier than rank 0, waits for the next rendezvous."""
    rendezvous = Repeated(KnownPorts.on_this_host(ports_of({}, job)))
    with ThreadPoolExecutor(3) as pool:
        third = pool.submit(join, place(job, 2, 3, rendezvous=rendezvous), SECONDS, Farewell())
        third.add_done_callback(lambda _: rendezvous.again.set())
        assert rendezvous.again.wait(SECONDS)
        first = pool.submit(join, place(job, 0, 3), SECONDS, farewell)
        second = pool.submit(join, place(job, 1, 3), SECONDS, Farewell())
        results = [each.result(SECONDS) for each in (third, first, second)]
    assert [result.environment["HOROVOD_RANK"] for result in results] == ["2", "0", "1"]
    for result in results:
        result.close()


@pytest.fixture
def other(job, monkeypatch):
    """A follower of a rank 0 that the test plays, and the server of the rendezvous."""
    monkeypatch.setattr(bootstrap, "REACH_SECONDS", 0.2)
    rendezvous = KnownPorts.on_this_host(ports_of({}, job))
    led = rendezvous.lead(job, SECONDS)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(join, place(job, 1, 2, rendezvous=rendezvous), SECONDS, Farewell()), led.server
        led.server.stop()


def test_a_rank_0_that_ends_is_not_waited_for(other):
    follower, server = other
    server.store.get("places/1", SECONDS)
    server.stop()
    with pytest.raises(PeerLostError):
        follower.result(SECONDS)


def test_a_rank_that_ends_before_it_has_read_the_world_is_left_to_the_engine(job, monkeypatch):
    monkeypatch.setattr(bootstrap, "REACH_SECONDS", 0.1)
    rendezvous = KnownPorts.on_this_host(ports_of({}, job))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, place(job, 0, 2, rendezvous=rendezvous), SECONDS, Farewell())
        found = rendezvous.follow(job, SECONDS)
        store = RendezvousClient(found.address, found.port, found.secret.key, SECONDS)
        store.set("places/1", store.get("places/0", SECONDS))
        result = first.result(SECONDS)
    assert result.environment["HOROVOD_SIZE"] == "2"
    result.close()


def test_rank_0_does_not_come(job):
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 0 was not found within 0.1 s on 127.0.0.1, port \d+, \d+.*for MPI"
    ):
        join(place(job, 1, 2), 0.1, Farewell())


def test_hosts_with_different_keys_say_so(job, monkeypatch):
    rendezvous = KnownPorts.on_this_host(ports_of({}, job))
    led = rendezvous.lead(job, SECONDS)
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "another one")
    try:
        with pytest.raises(CollectiveTimeoutError, match=r"has another secret: if the hosts do not share the home dir"):
            join(place(job, 1, 2, rendezvous=rendezvous), 0.5, Farewell())
    finally:
        led.server.stop()


def test_rank_0_warns_where_everybody_may_know_the_secret(job, monkeypatch, caplog):
    monkeypatch.setattr(known_ports, "LOOPBACK", "")
    rendezvous = KnownPorts(("127.0.0.1",), ports_of({}, job), Trust.NETWORK)
    rendezvous.lead(job, SECONDS).server.stop()
    assert "can join this job; to prevent that, set HOROVOD_SECRET_KEY" in caplog.text
    caplog.clear()
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "ours")
    rendezvous.lead(job, SECONDS).server.stop()
    assert not caplog.text


def test_a_launcher_that_does_not_say_where_rank_0_is():
    lost = Place("srun", "SLURM_STEP_NUM_TASKS", 1, 4, "job", None, remedy="set MASTER_ADDR to the host of task 0")
    with pytest.raises(SettingsError) as caught:
        join(lost, 1.0, Farewell())
    assert str(caught.value) == (
        "srun started this process as one of 4 (SLURM_STEP_NUM_TASKS=4), but its variables do not say where rank 0 is: "
        "set MASTER_ADDR to the host of task 0. Or start the script with hvdrun -np 4 python train.py. Set "
        "HOROVOD_SIZE=1 to train separate models on purpose"
    )


def test_a_port_that_the_next_rendezvous_has_taken_meanwhile(job):
    """It has no world yet, which says nothing about the rendezvous before."""
    store = MemoryStore()
    assert "has started twice" in bootstrap._reason(store, place(job, 1, 2))
    store.set(bootstrap.WORLD, b'{"error": "rank 3 did not come"}')
    assert bootstrap._reason(store, place(job, 1, 2)) == "rank 3 did not come"
