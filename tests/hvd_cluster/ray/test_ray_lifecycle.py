"""Starting, failing and ending: each test has an executor of its own and leaves nothing behind."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_cluster import add_node, connect, eventually, groups_left, workers_left

from executors.agents.ray import call_on_ranks, worker
from executors.agents.ray.placement import reservation
from executors.agents.ray.placement.autoscaler import Demand
from executors.api import ExecutorError, PlacementError, StartTimeoutError, WorkerError
from hvd_cluster.ray import RayExecutor

# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.leaves("descriptors", "processes")]

HANG_S = 600
NAME = r"\S+ \([\d.]+, node \w{8}\)"
SECONDS = 100


def executor_of(**arguments):
    patience = arguments.pop("patience", 30)
    settings = RayExecutor.create_settings(timeout_s=100, placement_group_timeout_s=patience)
    return RayExecutor(settings, **arguments)


def rank():
    return int(os.environ["HOROVOD_RANK"])


def group_id():
    return ray.util.get_current_placement_group().id.hex()


def node():
    return ray.get_runtime_context().get_node_id()


def die_on_1():
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_S)


def interrupt(driver):
    os.kill(driver, signal.SIGINT)
    time.sleep(HANG_S)


def fail_on_1():
    if rank() == 1:
        raise ValueError("rank 1 has had enough")
    time.sleep(HANG_S)


class Model:
    def __init__(self, start, step=1):
        self.value = start + step * rank()


class Owner:
    """An actor, or the body of a task, that holds an executor and never shuts it down."""

    def start(self):
        self.executor = executor_of(num_workers=1, use_current_placement_group=False)
        self.executor.start()
        return os.getpid()

    def shut_down(self):
        self.executor.shutdown()


def start_and_hang(path):
    pid = Owner().start()
    Path(path).write_text(str(pid))
    time.sleep(HANG_S)


def ask_and_hang(path):
    """Ask the autoscaler for more than there is."""
    demand = Demand(50, {"CPU": 1.0}, {})
    demand.update({})
    ray.get(demand._last)
    Path(path).write_text(str(os.getpid()))
    time.sleep(HANG_S)


def requests_left():
    return json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"[]")


class TestOwners:
    def test_groups_go_with_the_actors_that_were_killed(self):
        """One by the kernel, the other one by Ray."""
        first, second = [ray.remote(num_cpus=0)(Owner).remote() for _ in range(2)]
        pid, _ = ray.get([first.start.remote(), second.start.remote()])
        assert len(groups_left()) == 2
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(groups_left()) == 1, SECONDS)
        ray.kill(second)
        eventually(lambda: not groups_left() and not workers_left(), SECONDS)

    def test_a_group_goes_with_the_task_that_was_killed(self, tmp_path):
        path = tmp_path / "pid"
        ray.remote(num_cpus=0, max_retries=0)(start_and_hang).remote(str(path))
        eventually(lambda: path.exists() and path.read_text(), SECONDS)
        os.kill(int(path.read_text()), signal.SIGKILL)
        eventually(lambda: not groups_left() and not workers_left(), SECONDS)

    def test_a_request_to_the_autoscaler_goes_with_the_killed_job_and_that_of_another_stays(self, tmp_path):
        path = tmp_path / "pid"
        own = Demand(20, {"CPU": 1.0}, {})
        own.update({})
        ray.remote(num_cpus=0, max_retries=0)(ask_and_hang).remote(str(path))
        eventually(lambda: path.exists() and path.read_text(), SECONDS)
        eventually(lambda: len(requests_left()) == 70, SECONDS)
        os.kill(int(path.read_text()), signal.SIGKILL)
        eventually(lambda: len(requests_left()) == 20, SECONDS)
        own.withdraw()
        assert not requests_left()
        eventually(lambda: not workers_left(), SECONDS)

    def test_an_actor_that_shuts_down_leaves_no_keeper(self):
        owner = ray.remote(num_cpus=0)(Owner).remote()
        ray.get(owner.start.remote())
        ray.get(owner.shut_down.remote())
        eventually(lambda: not groups_left() and not workers_left(), SECONDS)


def test_a_keeper_without_an_owner_removes_the_group(monkeypatch):
    """The owner died before its first call arrived."""
    monkeypatch.setattr(reservation, "FIRST_CALL_S", 0.1)
    removed, killed = threading.Event(), threading.Event()
    monkeypatch.setattr(reservation, "remove_placement_group", lambda group: group == "group" and removed.set())
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="the reaper"))
    monkeypatch.setattr(ray, "kill", lambda actor: actor == "the reaper" and killed.set())
    reservation.PlacementGroupReaper("group")
    assert killed.wait(SECONDS)
    assert removed.is_set()


@pytest.fixture
def no_node_joins(monkeypatch):
    monkeypatch.setattr("executors.agents.ray.placement.shortage.JOIN_S", 0.1)


class TestPlacement:
    def test_workers_are_packed_and_leave_no_room_for_others(self):
        with executor_of(num_workers=2) as executor:
            assert len(set(executor.run(node))) == 1
            # Ray tells late what is used.
            eventually(lambda: ray.available_resources()["CPU"] == 2, SECONDS)
            with pytest.raises(PlacementError, match="missing: 1 CPU, which others use"):
                executor_of(num_workers=3, patience=1).start()

    def test_hosts_are_spread(self):
        with executor_of(num_hosts=2, num_workers_per_host=2) as executor:
            nodes = executor.run(node)
            assert executor.run(os.getenv, ["HOROVOD_LOCAL_SIZE"]) == ["2"] * 4
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]

    def test_workers_see_the_gpus_of_their_node(self):
        with executor_of(num_workers=2, use_gpu=True, gpus_per_worker=2) as executor:
            own = executor.run(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
            [seen, same] = executor.run(visible)
        assert seen == same
        assert sorted(seen) == ["0", "1", "2", "3"]
        assert seen[:2] == [own[0][0], own[1][0]]

    @pytest.mark.usefixtures("no_node_joins")
    def test_too_many_workers_are_refused_when_no_node_joins(self):
        with pytest.raises(PlacementError) as caught:
            executor_of(num_workers=5, patience=HANG_S).start()
        assert isinstance(caught.value, TimeoutError)
        text = str(caught.value)
        assert "requested: 5 workers with 1 CPU each, 5 CPU in all" in text
        assert "available: 4 CPU" in text
        assert "total: 4 CPU on 2 hosts" in text
        assert "missing: 1 of 5 workers" in text
        assert "no host has joined the cluster for 0.1 s, and no autoscaler adds any" in text
        assert not groups_left()

    def test_a_wait_for_an_autoscaler_ends(self, monkeypatch, caplog):
        monkeypatch.setattr("executors.agents.ray.placement.reservation.WARN_S", 0.5)
        monkeypatch.setattr("executors.agents.ray.placement.reservation.may_grow", lambda: True)
        with pytest.raises(PlacementError, match=r"waited 3 s \(placement_group_timeout_s\)"):
            executor_of(num_workers=5, patience=3).start()
        [record] = [record for record in caplog.records if record.name == "executors.agents.ray.placement.reservation"]
        assert record.message.startswith(
            "the cluster has no room for 5 workers\n  requested: 5 workers with 1 CPU each"
        )
        assert record.message.endswith("waiting up to 3 s for it (placement_group_timeout_s)")

    @pytest.mark.usefixtures("no_node_joins")
    def test_too_many_hosts(self):
        with pytest.raises(PlacementError, match="missing: 1 of 3 hosts with 1 CPU each"):
            executor_of(num_hosts=3).start()

    def test_everything_that_a_worker_may_get(self, cluster):
        head, resource = cluster.head_node.node_id, "node:__internal_head__"
        executor = executor_of(
            num_workers=2,
            cpus_per_worker=0.5,
            resources_per_worker={resource: 0.25, "memory": 1e6},
            placement_strategy="STRICT_PACK",
            label_selector={"ray.io/node-id": head},
            runtime_env={"env_vars": {"FLAVOUR": "cherry"}},
        )
        with executor:
            assert executor.run(node) == [head] * 2
            assert executor.run(os.getenv, ["FLAVOUR"]) == ["cherry"] * 2
            got = executor.run(lambda: ray.get_runtime_context().get_assigned_resources())
        assert [(each["CPU"], each[resource], each["memory"]) for each in got] == [(0.5, 0.25, 1e6)] * 2

    def test_labels_of_each_worker(self, cluster):
        head = cluster.head_node.node_id
        others = [{"ray.io/node-id": f"!{head}"}, {"ray.io/node-id": head}]
        with executor_of(num_workers=2, bundle_label_selector=others) as executor:
            first, second = executor.run(node)
        assert first != second

    @pytest.mark.usefixtures("no_node_joins")
    def test_labels_that_no_node_has(self):
        with pytest.raises(PlacementError, match=r"labels: of 2 hosts, 0 match {'zone': 'moon'}\n  missing: 2 of 2"):
            executor_of(num_workers=2, label_selector={"zone": "moon"}).start()

    def test_gpus_of_several_workers_on_a_host(self):
        executor = executor_of(num_hosts=1, num_workers_per_host=2, use_gpu=True, gpus_per_worker=2)
        with executor:
            assert {tuple(sorted(seen)) for seen in executor.run(visible)} == {("0", "1", "2", "3")}

    @pytest.mark.parametrize("reuse", [True, False])
    def test_inside_a_placement_group(self, reuse):
        def train():
            with executor_of(num_workers=1, use_current_placement_group=reuse) as executor:
                return executor.run(group_id), group_id()

        [group], own = in_group([{"CPU": 1}], train)
        assert (group == own) is reuse

    def test_the_current_group_is_too_small(self):
        with pytest.raises(PlacementError, match="room for 2 of 3 workers with 1 CPU each; its bundles are: 1 CPU; 1"):
            in_group([{"CPU": 1}, {"CPU": 1}], executor_of(num_workers=3).start)

    def test_the_current_group_is_placed_already(self):
        start = executor_of(num_workers=1, placement_strategy="SPREAD", label_selector={"a": "b"}).start
        with pytest.raises(PlacementError, match="placement_strategy and label_selector cannot change the current"):
            in_group([{"CPU": 1}], start)

    def test_the_current_group_is_busy(self):
        settings = RayExecutor.create_settings(timeout_s=2)
        start = RayExecutor(settings, num_workers=2).start
        with pytest.raises(StartTimeoutError, match=r"[01] of 2 workers started within 2 s .* in state CREATED"):
            in_group([{"CPU": 1}, {"CPU": 1}], start, tenants=1)

    def test_the_current_group_has_other_hosts(self):
        start = executor_of(num_hosts=2).start
        with pytest.raises(PlacementError, match=rf"2 hosts with 1 worker each were asked for, .* put 2 on {NAME};"):
            in_group([{"CPU": 2}], start)


class TestStart:
    def test_executable(self):
        executor = executor_of(num_workers=2)
        executor.start(Model, [100], {"step": 5}, {"FLAVOUR": 7})
        with executor:
            assert executor.execute(lambda model: model.value) == [100, 105]
            assert executor.execute_single(lambda model: model.value) == 100
            assert executor.run(os.getenv, ["FLAVOUR"]) == ["7", "7"]

    def test_executable_that_fails(self):
        executor = executor_of(num_workers=1)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'start'"):
            executor.start(Model)
        assert not groups_left()
        with pytest.raises(ExecutorError, match="not running"):
            executor.run(rank)

    def test_again_after_shutdown(self):
        executor = executor_of(num_workers=1)
        executor.start(extra_env_vars={"FLAVOUR": "first"})
        first = executor.run(os.getpid)
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(ExecutorError, match="not running"):
            executor.run(rank)
        with executor:
            assert not set(executor.run(os.getpid)) & set(first)
            assert executor.run(os.getenv, ["FLAVOUR"]) == [None]

    def test_after_another_connection(self, cluster):
        threads = set(threading.enumerate())  # of pools that later tests use, too
        executor = executor_of(num_workers=1)
        executor.start()
        ray.shutdown()
        connect(cluster)
        with pytest.raises(ExecutorError, match=r"ray\.shutdown\(\) was called meanwhile; call shutdown\(\) and start"):
            executor.run(rank)
        executor.shutdown()
        assert "hvd-rendezvous" not in {thread.name for thread in set(threading.enumerate()) - threads}

    def test_an_exception_in_the_with_block(self):
        def driver():
            with executor_of(num_workers=1):
                # Ray names a process a moment after its start.
                eventually(workers_left, SECONDS)
                raise KeyError("of the driver")

        with pytest.raises(KeyError):
            driver()
        assert not groups_left()


class Fragile(worker.HorovodWorker):
    """Dies when it shall tell where it is: so often that ``DEATHS`` files are in the folder ``MARKS``."""

    def location(self):
        marks = Path(os.environ["MARKS"])
        if len(list(marks.iterdir())) < int(os.environ["DEATHS"]):
            (marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().location()


class TestLostBeforeTheStart:
    @pytest.fixture
    def fragile(self, monkeypatch, tmp_path):
        monkeypatch.setattr(worker, "HorovodWorker", Fragile)

        def fragile(deaths):
            variables = {"MARKS": str(tmp_path), "DEATHS": str(deaths)}
            return executor_of(num_workers=2, runtime_env={"env_vars": variables})

        return fragile

    def test_another_one_takes_its_place(self, fragile, tmp_path, caplog):
        with fragile(deaths=1) as executor:
            assert executor.run(rank) == [0, 1]
        told = [record.message for record in caplog.records if record.message.startswith("a worker died: ")]
        # Both may have died at the same moment.
        assert 1 <= len(list(tmp_path.iterdir())) == len(told) <= 2
        assert told[0].endswith(" before it was ready; another one takes its place")

    def test_it_happens_again_and_again(self, fragile, monkeypatch):
        monkeypatch.setattr("executors.agents.ray.group.REPLACEMENTS", 1)
        with pytest.raises(ExecutorError, match=r"workers were lost 2 times before they were ready; the last one died"):
            fragile(deaths=100).start()

    def test_a_runtime_environment_that_fails(self):
        # Nothing listens on the port 9 of a test machine.
        executor = executor_of(num_workers=1, runtime_env={"working_dir": "https://127.0.0.1:9/x.zip"})
        with pytest.raises(ExecutorError, match=r"runtime_env of the workers could not be set up: .*onnection"):
            executor.start()


class TestFailure:
    def test_a_death_ends_the_job_at_once(self):
        executor = executor_of(num_hosts=2)
        executor.start()
        hosts = executor.run(node)
        with pytest.raises(WorkerError, match=rf"worker of rank 1 \(process \d+\) on {NAME} died") as caught:
            executor.run(die_on_1)
        assert (caught.value.rank, caught.value.host) == (1, hosts[1])
        assert isinstance(caught.value.__cause__, ray.exceptions.RayActorError)
        eventually(lambda: not workers_left() and not groups_left(), SECONDS)
        with pytest.raises(
            ExecutorError, match=rf"rank 1 \(process \d+\) on {NAME} died; call shutdown\(\) and start\(\)"
        ):
            executor.run(rank)
        executor.shutdown()
        with executor:
            assert executor.run(rank) == [0, 1]

    def test_a_death_between_two_calls(self):
        with executor_of(num_workers=2) as executor:
            os.kill(executor.run(os.getpid)[1], signal.SIGKILL)
            with pytest.raises(WorkerError, match="rank 1"):
                executor.run(time.sleep, [HANG_S])

    def test_an_exception_frees_those_that_hang(self, monkeypatch):
        monkeypatch.setattr(call_on_ranks, "GRACE_S", 0.5)
        with executor_of(num_workers=2) as executor:
            with pytest.raises(ValueError, match="rank 1 has had enough"):
                executor.run(fail_on_1)
            with pytest.raises(ExecutorError, match=r"ranks \[1\] raised and ranks \[0\] had not returned"):
                executor.run(rank)

    def test_the_cause_is_reported_not_its_consequence(self, monkeypatch, tmp_path):
        monkeypatch.setattr(call_on_ranks, "GRACE_S", SECONDS)
        reported = tmp_path / "reported"

        def report(self, *args, report=call_on_ranks.CallOnRanks.report):
            report(self, *args)
            reported.touch()

        monkeypatch.setattr(call_on_ranks.CallOnRanks, "report", report)

        def lose_the_peer():
            if rank() == 0:
                from collectives.api import PeerLostError

                raise PeerLostError("rank 1 is gone")
            while not reported.exists():
                time.sleep(0.01)
            raise ValueError("I left")

        with executor_of(num_workers=2) as executor, pytest.raises(ValueError, match="I left"):
            executor.run(lose_the_peer)

    def test_ctrl_c(self):
        with executor_of(num_workers=1) as executor:
            with pytest.raises(KeyboardInterrupt):
                executor.run(interrupt, [os.getpid()])
            with pytest.raises(ExecutorError, match="KeyboardInterrupt interrupted the wait"):
                executor.run(rank)

    def test_shutdown_ends_workers_that_are_busy(self, monkeypatch):
        monkeypatch.setattr("executors.agents.ray.group.POLITE_S", 0.5)
        with executor_of(num_workers=1) as executor:
            executor.run_remote(time.sleep, [HANG_S])

    def test_a_node_that_joins_late_and_is_lost(self, cluster, monkeypatch):
        """The job asks for three hosts while there are two, which joined long ago."""
        monkeypatch.setattr("executors.agents.ray.placement.shortage.JOIN_S", float("inf"))
        executor = executor_of(num_hosts=3, patience=HANG_S)
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(executor.start)
            eventually(lambda: groups_left() or starting.done(), SECONDS)
            assert not starting.done(), starting.exception()
            third = add_node(cluster, cluster.head_node._ray_params.temp_dir)
            starting.result(SECONDS)
            with executor:
                lost = executor.run(node).index(third.node_id)
                removed = pool.submit(cluster.remove_node, third, allow_graceful=False)
                with pytest.raises(WorkerError, match=rf"node {third.node_id[:8]}\) died") as caught:
                    executor.run(time.sleep, [HANG_S])
                assert (caught.value.rank, caught.value.host) == (lost, third.node_id)
                removed.result(SECONDS)
        eventually(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, SECONDS)


def visible():
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")


class Tenant:
    def here(self):
        return True


def in_group(bundles, fn, tenants=0):
    """The result of ``fn`` in a task inside of a new placement group, where ``tenants`` take a CPU each."""
    group = ray.util.placement_group(bundles)
    inside = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    others = [ray.remote(Tenant).options(num_cpus=1, **inside).remote() for _ in range(tenants)]
    task = ray.remote(lambda: fn()).options(num_cpus=0, **inside)  # noqa: PLW0108  Ray takes no methods
    try:
        assert all(ray.get([other.here.remote() for other in others], timeout=SECONDS))
        return ray.get(task.remote(), timeout=SECONDS)
    finally:
        ray.util.remove_placement_group(group)
