"""Parts that need no cluster: requests, missing resources, settings, variables."""

import importlib
import json
import pickle
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from executors.agents.ray.call_on_ranks import CallOnRanks
from executors.agents.ray.placement import nodes
from executors.agents.ray.placement.autoscaler import mirrors
from executors.agents.ray.placement.request import RayRequest, actor_options
from executors.agents.ray.placement.shortage import ClusterState, Outlook, capacity, explain
from executors.agents.ray.settings import check_extra
from executors.agents.ray.train.datasets import Sharded, split
from executors.api import ExecutorError, PlacementError, StartTimeoutError
from executors.job.call import Call
from executors.job.environment import gpu_variables, interface_variables
from executors.job.job import Job
from hvd_cluster.ray import RayExecutor, get_dataset_shard

# Ray opens connections for the cluster of other tests whenever it likes.
pytestmark = pytest.mark.leaves("descriptors", "processes")

SETTINGS = RayExecutor.create_settings()
TWO = {"a": {"CPU": 4.0, "GPU": 2.0}, "b": {"CPU": 4.0}}
COUNTS = ["num_workers", "num_hosts", "num_workers_per_host", "gpus_per_worker"]


class TestRequest:
    def test_packs_one_bundle_per_worker(self):
        request = RayRequest(num_workers=3, cpus_per_worker=2)
        assert (request.size, request.strategy) == (3, "PACK")
        assert request.bundles == [{"CPU": 2}] * 3
        assert [request.bundle_of(worker) for worker in range(3)] == [0, 1, 2]

    def test_spreads_one_bundle_per_host(self):
        request = RayRequest(num_hosts=2, num_workers_per_host=3, use_gpu=True, gpus_per_worker=2)
        assert (request.size, request.strategy) == (6, "STRICT_SPREAD")
        assert request.bundles == [{"CPU": 3, "GPU": 6}] * 2
        assert [request.bundle_of(worker) for worker in range(6)] == [0, 0, 0, 1, 1, 1]

    @pytest.mark.parametrize("name", COUNTS)
    def test_takes_any_integer(self, name):
        shape = {} if name == "num_workers" else {"num_hosts": 1}
        request = RayRequest(**{**shape, "use_gpu": True, name: np.int64(2)})
        assert type(getattr(request, name)) is int

    def test_use_gpu_means_one(self):
        assert RayRequest(num_workers=1, use_gpu=True).worker == {"CPU": 1, "GPU": 1}

    def test_workers_per_host_may_be_none_with_num_workers(self):
        assert RayRequest(num_workers=2, num_workers_per_host=None).size == 2

    def test_cpus_may_be_a_fraction(self):
        request = RayRequest(num_hosts=2, num_workers_per_host=3, cpus_per_worker=np.float64(0.5))
        assert request.worker == {"CPU": 0.5}
        assert request.bundles == [{"CPU": 1.5}] * 2

    def test_other_resources(self):
        request = RayRequest(num_workers=2, use_gpu=True, resources_per_worker={"TPU": 4, "memory": 1e9, "disk": 0.5})
        assert request.bundles == [{"CPU": 1, "GPU": 1, "TPU": 4, "memory": 1e9, "disk": 0.5}] * 2
        options = {"num_cpus": 1, "num_gpus": 1, "memory": 1e9, "resources": {"TPU": 4, "disk": 0.5}}
        assert actor_options(request.worker) == options

    def test_labels_of_all_workers_or_of_each_bundle(self):
        assert RayRequest(num_workers=2).selectors == []
        assert RayRequest(num_workers=2, label_selector={"zone": "a"}).selectors == [{"zone": "a"}] * 2
        each = [{"zone": "a"}, {}]
        assert RayRequest(num_hosts=2, num_workers_per_host=2, bundle_label_selector=each).selectors == each

    @pytest.mark.parametrize("name", COUNTS)
    @pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
    def test_refuses_a_count(self, name, value):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, but must be a positive integer"):
            RayExecutor(SETTINGS, **{"num_workers": 1, "use_gpu": True, name: value})

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({}, "num_workers is None and num_hosts is None; give one"),
            ({"num_workers": 2, "num_hosts": 3}, "num_workers is 2 and num_hosts is 3; give one"),
            ({"num_workers": 2, "num_workers_per_host": 2}, "no meaning with num_workers; give num_hosts"),
            ({"num_hosts": 2, "num_workers_per_host": None}, "must be a positive integer when num_hosts"),
            ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu is False; set use_gpu=True"),
            ({"num_workers": 2, "use_gpu": 1}, "use_gpu is 1, but must be True or False"),
            ({"resources_per_worker": ["TPU"]}, r"resources_per_worker is \['TPU'\], but must be a dict of resources"),
            ({"resources_per_worker": {"CPU": 2}}, "resources_per_worker has 'CPU'; give cpus_per_worker instead"),
            ({"resources_per_worker": {"GPU": 2}}, "resources_per_worker has 'GPU'; give use_gpu and gpus_per_worker"),
            ({"resources_per_worker": {"object_store_memory": 2}}, "which Ray does not reserve for actors"),
            ({"resources_per_worker": {"x": -1}}, r"resources_per_worker\['x'\] is -1, but must be a positive number"),
            ({"placement_strategy": "NEAR"}, "'NEAR', but must be one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
            ({"num_hosts": 2, "placement_strategy": "PACK"}, "num_hosts are different hosts, which is STRICT_SPREAD"),
            ({"label_selector": {"a": 1}}, "label_selector is {'a': 1}, but must be a dict of labels"),
            ({"bundle_label_selector": {"a": "1"}}, "but must be a list of 2 dicts, one for each worker"),
            (
                {"num_hosts": 1, "bundle_label_selector": []},
                r"is \[\], but must be a list of 1 dicts, one for each host",
            ),
            ({"bundle_label_selector": [{}, 5]}, r"bundle_label_selector\[1\] is 5, but must be a dict of labels"),
            ({"bundle_label_selector": [{}, {}], "label_selector": {}}, "are both given; give label_selector, the"),
            ({"runtime_env": "pip"}, "runtime_env is 'pip', but must be a dict of Ray's"),
            ({"runtime_env": {"pips": []}}, "runtime_env has pips, but its fields are .*working_dir"),
            ({"runtime_env": {"env_vars": {"A": 1}}}, r"runtime_env\['env_vars'\] has 'A': 1, but names and values"),
            ({"runtime_env": {"env_vars": {"HOROVOD_RANK": "1"}}}, "has HOROVOD_RANK, which RayExecutor sets"),
            ({"runtime_env": {"working_dir": "/none"}}, "which Ray does not take: /none is not a valid path"),
        ],
    )
    def test_refuses_a_combination(self, arguments, text):
        given = arguments if not arguments or "num_hosts" in arguments else {"num_workers": 2, **arguments}
        with pytest.raises(ValueError, match=text):
            RayExecutor(SETTINGS, **given)

    @pytest.mark.parametrize("value", [0, -1, 1e-5, "2", True, None, float("nan"), float("inf")])
    def test_refuses_cpus(self, value):
        with pytest.raises(ValueError, match=f"cpus_per_worker is {value!r}, but must be a positive number"):
            RayExecutor(SETTINGS, num_workers=1, cpus_per_worker=value)


class TestShortage:
    def state(self, **available):
        return ClusterState(available, {"CPU": 8.0, "GPU": 2.0}, TWO)

    def test_says_requested_available_total_and_hosts(self):
        text = explain(RayRequest(num_workers=12), self.state(CPU=3.0))
        assert text.startswith("the cluster has no room for 12 workers\n")
        assert "requested: 12 workers with 1 CPU each, 12 CPU in all" in text
        assert "available: 3 CPU\n" in text
        assert "total: 8 CPU on 2 hosts (a: 4 CPU; b: 4 CPU)" in text
        assert "missing: 4 of 12 workers with 1 CPU each, even when the cluster is idle" in text

    def test_one_is_not_many(self):
        text = explain(RayRequest(num_workers=1, cpus_per_worker=9), ClusterState({}, {}, {"a": {"CPU": 4.0}}))
        assert "no room for 1 worker\n" in text
        assert "requested: 1 worker with 9 CPU each" in text
        assert "on 1 host (a: 4 CPU)" in text
        assert "missing: 1 of 1 worker with 9 CPU each" in text
        assert "1 different host with 9 CPU" in explain(RayRequest(num_hosts=1, cpus_per_worker=9), self.state())

    def test_a_bundle_needs_one_host(self):
        request = RayRequest(num_workers=2, use_gpu=True, gpus_per_worker=2)
        assert capacity(request, self.state()) == 1
        assert "missing: 1 of 2 workers with 1 CPU + 2 GPU" in explain(request, self.state(CPU=8.0, GPU=2.0))

    def test_hosts_must_differ(self):
        assert "missing: 1 of 3 hosts with 1 CPU each" in explain(RayRequest(num_hosts=3), self.state(CPU=8.0))

    def test_one_host_for_all(self):
        request = RayRequest(num_workers=6, placement_strategy="STRICT_PACK")
        assert capacity(request, self.state()) == 4
        text = explain(request, self.state())
        assert "requested: 6 workers with 1 CPU each, together on one host, 6 CPU in all" in text
        assert "missing: 2 of 6 workers" in text

    def test_fractions_are_not_cut(self):
        assert (
            capacity(RayRequest(num_workers=50, cpus_per_worker=0.1), ClusterState({}, {}, {"a": {"CPU": 1.0}})) == 10
        )

    def test_labels(self):
        state = ClusterState({}, {}, TWO, {"a": {"zone": "x"}, "b": {"zone": "y"}})
        all_in_x = RayRequest(num_workers=5, label_selector={"zone": "x"})
        assert capacity(all_in_x, state) == 4
        assert "labels: of 2 hosts, 1 match {'zone': 'x'}\n" in explain(all_in_x, state)
        each = RayRequest(num_workers=3, bundle_label_selector=[{"zone": "x"}, {"zone": "z"}, {}])
        assert capacity(each, state) == 2
        assert "labels: of 2 hosts, 1 match {'zone': 'x'}; 0 match {'zone': 'z'}\n" in explain(each, state)

    def test_what_others_use(self):
        assert "missing: 2 CPU, which others use" in explain(RayRequest(num_workers=5), self.state(CPU=3.0))

    def test_free_but_in_the_wrong_place(self):
        text = explain(RayRequest(num_workers=2, cpus_per_worker=4), self.state(CPU=8.0))
        assert "the free resources are on the wrong hosts" in text

    def test_many_hosts_are_cut(self):
        state = ClusterState({}, {}, {f"host-{index}": {} for index in range(20)})
        text = explain(RayRequest(num_workers=1), state)
        assert "host-15" in text
        assert "host-16" not in text
        assert "and 4 more" in text


class TestOutlook:
    """The request needs three hosts."""

    def check(self, *seen, may_grow=False, quiet=0.0):
        """A check for each (time, number of hosts)."""
        outlook = Outlook(RayRequest(num_hosts=3), lambda: may_grow, quiet)
        for now, hosts in seen:
            outlook.check(ClusterState(hosts={str(host): {"CPU": 4.0} for host in range(hosts)}), now)

    def test_hosts_have_time_to_join(self):
        self.check((100.0, 1), (104.9, 1), (105.5, 2), (110.4, 2), (111.0, 3), (200.0, 3))

    def test_no_host_joins(self):
        with pytest.raises(PlacementError, match=r"(?s)missing: 1 of 3 hosts.* no host has joined the cluster for 5 s"):
            self.check((100.0, 1), (104.0, 2), (109.0, 2))

    def test_no_host_has_joined_for_long(self):
        self.check((100.0, 1), (104.0, 2), quiet=4.9)
        with pytest.raises(PlacementError):
            self.check((100.0, 1), quiet=5.0)

    @pytest.mark.parametrize(("age", "quiet"), [(10.0, 0.0), (29.0, 0.0), (100.0, 70.0)])
    def test_the_clock_of_a_node_may_differ_by_half_a_minute(self, monkeypatch, age, quiet):
        joined = SimpleNamespace(start_time_ms=1_000_000_000, end_time_ms=0)
        left = SimpleNamespace(start_time_ms=1_000_099_000, end_time_ms=1_000_099_500)
        client = SimpleNamespace(get_all_node_info=lambda timeout: {"joined": joined, "left": left})
        monkeypatch.setattr(nodes.ray._private.worker, "global_worker", SimpleNamespace(gcs_client=client))
        monkeypatch.setattr(nodes, "time", SimpleNamespace(time=lambda: 1_000_000.0 + age))
        assert nodes.quiet_seconds() == quiet

    def test_a_host_that_leaves_may_come_back(self):
        self.check((100.0, 3), (200.0, 3), (200.5, 2), (204.9, 2), (205.0, 3))
        with pytest.raises(PlacementError):
            self.check((100.0, 3), (200.0, 3), (200.5, 2), (205.0, 2))

    def test_an_autoscaler_takes_its_time(self):
        self.check((100.0, 1), (1000.0, 1), may_grow=True)


class TestAutoscaler:
    """Which report shows that nobody adds nodes: those that Ray writes for nodes without an autoscaler."""

    @pytest.mark.parametrize(
        ("nodes", "expected"),
        [({"node_" + "f1" * 28: 1}, True), ({"ray.head.default": 1}, False), ({}, False), (None, False)],
    )
    def test_report(self, nodes, expected):
        assert mirrors(json.dumps({"autoscaler_report": {"active_nodes": nodes}}).encode()) is expected

    @pytest.mark.parametrize("report", [None, b"{}", b'{"autoscaler_report": null}'])
    def test_no_report_yet(self, report):
        assert not mirrors(report)


class TestVariables:
    def test_all_see_all_gpus_and_the_local_rank_is_ones_own(self):
        assert gpu_variables([("4", "5"), ("0", "1")]) == {"CUDA_VISIBLE_DEVICES": "4,0,5,1"}

    def test_no_gpus(self):
        assert gpu_variables([(), ()]) == {}

    def test_interfaces(self):
        both = {"HOROVOD_GLOO_IFACE": "eth0", "NCCL_SOCKET_IFNAME": "eth0,eth1"}
        assert interface_variables(["eth0", "eth1"]) == both
        assert interface_variables([]) == {}

    def test_extra_variables_become_text(self):
        given = {"HOROVOD_CYCLE_TIME": 5, "OMP_NUM_THREADS": np.int64(2), "PATH": Path("/a")}
        assert check_extra(given) == {"HOROVOD_CYCLE_TIME": "5", "OMP_NUM_THREADS": "2", "PATH": "/a"}

    @pytest.mark.parametrize("variables", [5, ["A=b"], {5: "a"}, {"A": None}, {"": "a"}, {"A=": "b"}, {"A": "\0"}])
    def test_extra_variables_are_variables(self, variables):
        with pytest.raises(ValueError, match=r"extra_env_vars (is|has)"):
            check_extra(variables)

    def test_extra_variables_leave_the_rank_alone(self):
        with pytest.raises(ValueError, match="extra_env_vars has HOROVOD_RANK, which RayExecutor sets"):
            check_extra({"HOROVOD_RANK": "0"})


class TestSettings:
    @pytest.mark.parametrize("name", ["timeout_s", "placement_group_timeout_s"])
    @pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), 3e6, 10**400, "30", None, True])
    def test_refuses_a_timeout(self, name, value):
        with pytest.raises(ValueError, match=f"{name} is {value!r}, but must be a positive number of seconds"):
            RayExecutor.create_settings(**{name: value})

    @pytest.mark.parametrize("value", [7, 7.0, np.int64(7), np.float32(7)])
    def test_takes_any_number_of_seconds(self, value):
        settings = RayExecutor.create_settings(timeout_s=value)
        assert (type(settings.timeout_s), settings.timeout_s) == (float, 7.0)

    @pytest.mark.parametrize(("nics", "expected"), [("eth0", ("eth0",)), (["a", "b"], ("a", "b")), (None, ())])
    def test_interfaces(self, nics, expected):
        assert RayExecutor.create_settings(nics=nics).nics == expected

    @pytest.mark.parametrize("nics", [[""], 5, "", [5]])
    def test_refuses_interfaces(self, nics):
        with pytest.raises(ValueError, match=re.escape(f"nics is {nics!r}, but must be names of network interfaces")):
            RayExecutor.create_settings(nics=nics)

    def test_what_is_set_later_counts_from_the_next_start(self, monkeypatch):
        monkeypatch.setattr("hvd_cluster.ray.executor.check_connection", lambda: None)
        started = []
        monkeypatch.setattr("hvd_cluster.ray.workers.RayJob", lambda _, settings, *__: started.append(settings))
        settings = RayExecutor.create_settings()
        executor = RayExecutor(settings, num_workers=1)
        settings.nics = {"eth1", "eth0"}
        settings.timeout_s = 7
        executor.start()
        assert [(each.nics, each.start_timeout) for each in started] == [(("eth0", "eth1"), 7)]

    def test_what_is_set_later_for_an_elastic_job(self):
        settings = RayExecutor.create_settings()
        executor = RayExecutor(settings, min_workers=1)
        settings.nics, settings.timeout_s = "eth0", 7
        options = executor._workers.options
        assert (options.nics, options.start_timeout) == (("eth0",), 7)

    @pytest.mark.parametrize(("name", "value"), [("nics", {""}), ("timeout_s", 0), ("placement_group_timeout_s", "1")])
    def test_refuses_what_is_set_later(self, name, value):
        settings = RayExecutor.create_settings()
        with pytest.raises(ValueError, match=f"{name} is .*, but must be"):
            setattr(settings, name, value)

    def test_the_fields_of_horovod(self):
        settings = RayExecutor.create_settings(ssh_identity_file="key.pem")
        assert (settings.verbose, settings.ssh_port, settings.ssh_identity_file) == (1, None, "key.pem")
        for arguments in ({"num_workers": 1}, {"min_workers": 1}):
            RayExecutor(settings, **arguments)
            assert settings.elastic is ("min_workers" in arguments)

    def test_an_unknown_field(self):
        with pytest.raises(AttributeError, match="nic"):
            RayExecutor.create_settings().nic = "eth0"

    def test_writes_the_key_for_the_owner_only_and_once(self, tmp_path):
        path = tmp_path / "key.pem"
        RayExecutor.create_settings(ssh_identity_file=str(path), ssh_str="secret")
        assert path.read_text() == "secret"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        RayExecutor.create_settings(ssh_identity_file=str(path), ssh_str="other")
        assert path.read_text() == "secret"

    def test_keeps_the_key_nowhere(self):
        assert "secret" not in repr(RayExecutor.create_settings(ssh_str="secret"))

    def test_refuses_other_settings(self):
        with pytest.raises(ValueError, match=r"the result of RayExecutor\.create_settings\(\)"):
            RayExecutor({"timeout_s": 30}, num_workers=1)


class FakeDataset:
    def streaming_split(self, ranks, *, equal):
        assert equal
        return [f"rows of {rank}" for rank in range(ranks)]


class TestDatasets:
    def test_each_rank_has_its_part_while_the_function_runs(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_RANK", "1")
        splits = split({"train": FakeDataset(), "test": FakeDataset()}, 2)
        sharded = pickle.loads(ray.cloudpickle.dumps(Sharded(get_dataset_shard, splits)))
        assert sharded("test") == "rows of 1"
        with pytest.raises(ExecutorError, match=r"no dataset 'other' .* \(datasets: 'train', 'test'\)"):
            sharded("other")
        with pytest.raises(ExecutorError, match=r"no dataset 'train' .* \(datasets: none\); call RayExecutor"):
            get_dataset_shard()

    def test_the_function_keeps_its_name_in_errors(self):
        assert Call.of(Sharded(self.check, {})).name == "TestDatasets.check"

    def check(self, executor, datasets, error, text):
        with pytest.raises(error, match=text):
            executor.run(print, datasets=datasets)

    @pytest.mark.parametrize("datasets", [5, [FakeDataset()], {"train": [1, 2]}, FakeDataset()])
    def test_refuses_what_is_no_dict_of_datasets(self, monkeypatch, datasets):
        monkeypatch.setattr("hvd_cluster.ray.executor.check_connection", lambda: None)
        monkeypatch.setattr("hvd_cluster.ray.workers.RayJob", lambda *_: None)
        executor = RayExecutor(SETTINGS, num_workers=1)
        executor.start()
        self.check(executor, datasets, TypeError, "but must be a dict of datasets of Ray Data by name")

    def test_not_for_elastic_jobs(self, monkeypatch):
        monkeypatch.setattr("hvd_cluster.ray.executor.check_connection", lambda: None)
        with RayExecutor(SETTINGS, min_workers=1) as executor:
            self.check(executor, {}, NotImplementedError, "datasets are for a fixed number of workers")


class TestWithoutRay:
    def test_not_installed(self, monkeypatch):
        for name in [name for name in sys.modules if name.startswith(("executors.agents.ray", "hvd_cluster.ray"))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ImportError, match=r'pip install "hvd-cluster\[ray\]"'):
            importlib.import_module("hvd_cluster.ray")

    def test_not_initialized(self, monkeypatch):
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(ExecutorError, match=r"call ray\.init\(\) first"):
            RayExecutor(SETTINGS, num_workers=1).start()

    def test_not_started(self):
        executor = RayExecutor(SETTINGS, num_workers=1)
        for use in (executor.run, executor.run_remote, executor.execute, executor.execute_single):
            with pytest.raises(ExecutorError, match=r"not running; call start\(\) first"):
                use(print)
        executor.shutdown()

    def test_gathering_nothing(self):
        gathering = CallOnRanks([], pytest.fail, Job(1))
        gathering.wait()
        assert gathering.complete
        assert gathering.values() == []

    def test_gathering_that_is_late_already(self, monkeypatch):
        """Its time is over before Ray is asked, so nothing waits for Ray."""
        monkeypatch.setattr(ray, "wait", lambda *_, **__: pytest.fail("nothing is left to wait for"))
        member = SimpleNamespace(location=SimpleNamespace(node="a"))
        gathering = CallOnRanks([member], lambda *_: "answer", Job(1), timeout=0.0)
        gathering.wait()
        assert not gathering.complete
        with pytest.raises(StartTimeoutError, match="did not answer in time"):
            gathering.values()
