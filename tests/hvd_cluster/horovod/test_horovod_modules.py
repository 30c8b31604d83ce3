"""Modules that tools import from Horovod, below horovod.common and horovod.runner."""

import importlib
import inspect

import pytest

import hvd_cluster
from executors.job import discovery
from hvd_cluster import elastic
from hvd_cluster.core import basics

STAND_IN = f"hvd-cluster {hvd_cluster.__version__}, which stands in for Horovod here, does not have "
pytestmark = pytest.mark.usefixtures("horovod_alias")


def load(name):
    return importlib.import_module(f"horovod.{name}")


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_functions_of_a_binding():
    own = load("common.basics").HorovodBasics(__file__, "mpi_lib_v2")
    assert own.init is basics.init
    assert [own.Average, own.Sum, own.Adasum, own.Min, own.Max, own.Product] == list(range(6))
    assert (own.is_initialized(), own.mpi_built(), own.nccl_built()) == (False, False, 0)
    with pytest.raises(ValueError, match="has not been initialized"):
        own.rank()
    with pytest.raises(AttributeError) as caught:
        own.MPI_LIB_CTYPES  # noqa: B018  the access is what is tested
    assert str(caught.value) == STAND_IN + "horovod.common.basics.HorovodBasics.MPI_LIB_CTYPES"
    assert own.start_timeline is basics.start_timeline


def test_the_core_of_elastic_training():
    own = load("common.elastic")
    for module in (own, load("torch.elastic")):
        assert (module.State, module.ObjectState) == (elastic.State, elastic.ObjectState)
    assert parameters(own.run_fn) == ["func", "reset"]
    results = load("runner.elastic.worker").HostUpdateResult

    class Counter(own.State):
        resets, saved = 0, 0

        def save(self):
            self.saved += 1

        def sync(self):
            """One rank has one state."""

        def reset(self):
            self.resets += 1

    @lambda function: own.run_fn(function, reset=None)
    def train(state, steps):
        if not state.resets:
            state.on_hosts_updated(1, results.added)
            state.commit()
        return state.resets, state.saved, steps

    basics.init()
    try:
        assert train(Counter(None, basics.rank), 5) == (1, 1, 5)
    finally:
        basics.shutdown()
    assert [int(result) for result in results] == [1, 2]
    assert (results.no_update, results.mixed) == (0, 3)


def test_hosts_and_their_slots(tmp_path):
    hosts = load("runner.common.util.hosts")
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    assert hosts.parse_host_files(str(tmp_path / "hosts")) == "a:2,b:3"
    found = hosts.parse_hosts("a:2,b:3")
    assert found == [hosts.HostInfo("a", 2), hosts.HostInfo.from_string("b:3")]
    with pytest.raises(ValueError, match="'c' is not host:slots"):
        hosts.parse_hosts("c")
    slots = hosts.get_host_assignments(found, 2, 4)
    numbers = [(s.hostname, s.rank, s.local_rank, s.cross_rank, s.size, s.local_size, s.cross_size) for s in slots]
    assert numbers == [
        ("a", 0, 0, 0, 4, 2, 2),
        ("a", 1, 1, 0, 4, 2, 2),
        ("b", 2, 0, 1, 4, 2, 2),
        ("b", 3, 1, 1, 4, 2, 2),
    ]
    assert len(hosts.get_host_assignments(found, 5)) == 5
    with pytest.raises(ValueError, match="6 processes need 6 slots, but the hosts have 5"):
        hosts.get_host_assignments(found, 6)


def test_secrets():
    secret = load("runner.common.util.secret")
    assert secret.HOROVOD_SECRET_KEY == "_HOROVOD_SECRET_KEY"
    keys = {secret.make_secret_key() for _ in range(3)}
    assert [len(key) for key in keys] == [32, 32, 32]


def test_timeouts():
    timeout = load("runner.common.util.timeout")
    long = timeout.Timeout(1000, "{activity} took longer than {timeout} s")
    long.check_time_out_for("it")
    assert 0 < long.remaining() <= 1000
    assert not long.timed_out()
    over = timeout.Timeout(0, "{activity} took longer than {timeout} s")
    assert over.timed_out()
    with pytest.raises(timeout.TimeoutException, match=r"^it took longer than 0 s$"):
        over.check_time_out_for("it")


def test_the_compute_service_of_a_data_service():
    own = load("runner.common.service.compute_service")
    key = load("runner.common.util.secret").make_secret_key()
    with own.ComputeService(1, 1, key) as service, own.ComputeClient(service.addresses(), key) as client:
        client.register_dispatcher(0, "host:1")
        assert client.wait_for_dispatcher_registration(0, 60) == "host:1"
        with pytest.raises(load("runner.common.util.timeout").TimeoutException, match=r"not all of its workers"):
            client.wait_for_dispatcher_worker_registration(0, 0.1)


def test_ways_to_find_hosts():
    own = load("runner.elastic.discovery")
    assert own.HostDiscoveryScript is discovery.HostDiscoveryScript

    class Two(own.HostDiscovery):
        def find_available_hosts_and_slots(self):
            return {"a": 1, "b": 1}

    assert Two().find_available_hosts_and_slots() == {"a": 1, "b": 1}
    fixed = own.FixedHosts({"a": 2})
    fixed.set({"b": 3})
    assert fixed.find_available_hosts_and_slots() == {"b": 3}


@pytest.mark.parametrize(
    "name",
    [
        "horovod.runner.util",
        "horovod.runner.elastic.driver",
        "horovod.runner.elastic.settings",
        "horovod.runner.common.util.settings",
        "horovod.runner.common.service.driver_service",
        "horovod.runner.gloo_run",
    ],
)
def test_a_module_that_we_do_not_have(name):
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    assert str(caught.value) == STAND_IN + name


@pytest.mark.parametrize(
    "name", ["horovod.runner.launch.parse_args", "horovod.common.elastic.notification_manager", "horovod.runner.js_run"]
)
def test_a_name_that_we_do_not_have(name):
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {last}")
    assert str(caught.value) == STAND_IN + name
