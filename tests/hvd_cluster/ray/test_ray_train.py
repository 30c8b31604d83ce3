"""HvdTrainer: worker groups of Ray Train as jobs of ours."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from tests.doc_blocks import blocks, execute

pytest.importorskip("torch")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.execution.failure_handling import FailureDecision, create_failure_policy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError

from collectives.api import InvalidRequestError
from executors.agents.ray.train import backend as backend_module
from executors.agents.ray.train import last_report
from executors.agents.ray.train.backend import JobBackend, JobConfig, enter
from executors.agents.ray.worker import Location, here
from hvd_cluster.core import basics
from hvd_cluster.ray import HvdTrainer

# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = pytest.mark.leaves("descriptors", "processes")


def place(node, pid, gpus=(), address="192.0.2.7"):
    return Location(node, address, "host", pid, gpus)


class Group:
    """The worker group that the backend sees; it keeps what the workers would get."""

    def __init__(self, *locations, sending=ray.put):
        self.locations = locations
        self.sending = sending
        self.environments = {}

    def execute_async(self, fn):
        assert fn is here
        return [ray.put(location) for location in self.locations]

    def execute_single_async(self, worker, fn, environment, before):
        assert fn is enter
        self.environments[worker] = environment
        return self.sending(None)

    def column(self, name):
        return [self.environments[worker].get(name) for worker in range(len(self.locations))]


@pytest.fixture
def backend(cluster):
    backend = JobBackend()
    yield backend
    backend.on_shutdown(None, JobConfig())


@pytest.fixture
def hasty(monkeypatch):
    """Ray Train looks at its workers often, and starts no actor that the tests do not need."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")


def is_served(environment):
    address = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    try:
        socket.create_connection(address, timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True


def test_each_worker_gets_the_environment_of_its_place(backend):
    group = Group(place("a", 1, ("1", "0")), place("a", 2, ("2",)), place("b", 3, ("0",)))
    backend.on_start(group, JobConfig(nics=("lo", "eth0")))
    assert group.column("HOROVOD_RANK") == ["0", "1", "2"]
    assert group.column("HOROVOD_LOCAL_RANK") == ["0", "1", "0"]
    assert group.column("HOROVOD_CROSS_RANK") == ["0", "0", "1"]
    assert group.column("HOROVOD_HOSTNAME") == ["a", "a", "b"]
    assert group.column("CUDA_VISIBLE_DEVICES") == ["1,2,0", "1,2,0", "0"]
    assert group.column("HOROVOD_GLOO_IFACE") == ["lo"] * 3
    assert group.column("HOROVOD_GLOO_RENDEZVOUS_ADDR") == [ray.util.get_node_ip_address()] * 3


def test_ranks_are_those_of_ray_train_in_any_order_of_nodes(backend):
    group = Group(place("a", 1, ("0",)), place("b", 2, ("0",)), place("a", 3, ("1",)))
    backend.on_start(group, JobConfig())
    assert group.column("HOROVOD_RANK") == ["0", "1", "2"]
    assert group.column("HOROVOD_LOCAL_RANK") == ["0", "0", "1"]
    assert group.column("HOROVOD_CROSS_RANK") == ["0", "1", "0"]
    assert group.column("CUDA_VISIBLE_DEVICES") == ["0,1", "0", "0,1"]


def test_the_server_lives_as_long_as_the_group_and_the_next_group_has_a_job_of_its_own(backend):
    own = ray.util.get_node_ip_address()
    first, second = Group(place("a", 1, address=own)), Group(place("a", 2, address=own))
    backend.on_start(first, JobConfig())
    assert first.column("HOROVOD_GLOO_RENDEZVOUS_ADDR") == ["127.0.0.1"]
    assert is_served(first.environments[0])
    backend.on_shutdown(first, JobConfig())
    assert not is_served(first.environments[0])
    backend.on_start(second, JobConfig())
    assert is_served(second.environments[0])
    assert first.column("HOROVOD_JOB_ID") != second.column("HOROVOD_JOB_ID")


def test_a_group_of_whose_end_nobody_heard_is_ended_by_the_next_one(backend):
    first, second = Group(place("a", 1)), Group(place("a", 2))
    backend.on_start(first, JobConfig())
    backend.on_start(second, JobConfig())
    assert not is_served(first.environments[0])
    assert is_served(second.environments[0])


def test_a_worker_that_is_lost_while_the_group_starts_leaves_no_server(backend):
    def lose(_):
        raise RayActorError

    group = Group(place("a", 1), sending=lose)
    with pytest.raises(RayActorError):
        backend.on_start(group, JobConfig())
    assert not is_served(group.environments[0])


def test_a_worker_that_does_not_answer_and_ray_train_tries_again(backend, monkeypatch):
    monkeypatch.setattr(backend_module, "START_S", 0.1)

    @ray.remote(resources={"nowhere": 1})
    def never():
        """There is no node for it."""

    pending = []
    group = Group(place("a", 1), sending=lambda _: pending.append(never.remote()) or pending[0])
    with pytest.raises(Exception, match=r"1 worker of Ray Train did not all answer within 0\.1 s") as caught:
        backend.on_start(group, JobConfig())
    policy = create_failure_policy(FailureConfig())
    assert policy.make_decision(ControllerError(caught.value)) is FailureDecision.RETRY
    ray.cancel(pending[0])
    assert not is_served(group.environments[0])


def test_the_answer_to_ctrl_c_is_the_old_one_after_a_fit(monkeypatch):
    """Ray Train's own keeps the controller alive, and takes every later Ctrl-C for itself."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(DataParallelTrainer, "fit", lambda trainer: signal.signal(signal.SIGINT, lambda *_: None))
    HvdTrainer(lambda: None).fit()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_name_of_an_interface_that_cannot_be():
    with pytest.raises(ValueError, match=r"nics is \[''\], but must be names of network interfaces"):
        HvdTrainer(lambda: None, nics=[""])


def test_datasets_are_not_for_workers_that_are_replaced():
    with pytest.raises(
        ValueError, match="datasets are for a fixed group of workers: Ray Data has no part for a worker"
    ):
        HvdTrainer(lambda: None, datasets={"train": None}, elastic=True)


@pytest.mark.parametrize("elastic", [False, True])
def test_without_workers_the_function_runs_here(elastic):
    def train():
        import hvd_cluster.torch as hvd

        hvd.init()
        return hvd.size()

    trainer = HvdTrainer(train, scaling_config=ScalingConfig(num_workers=0), elastic=elastic)
    assert trainer.fit().return_value == 1
    assert not basics.is_initialized()


def test_a_new_worker_that_trained_alone_is_refused(monkeypatch):
    """Its training function calls no elastic one, and it would report a model of its own."""
    monkeypatch.setattr(basics, "worlds", lambda: SimpleNamespace(is_alone=True))
    around = HvdTrainer(lambda: None, elastic=True).backend_config.around
    with (
        pytest.raises(InvalidRequestError, match="has trained without the others: the training function must"),
        around(),
    ):
        """Train."""


def test_nobody_waits_at_the_barrier_of_a_report_when_the_collectives_have_ended(monkeypatch):
    lifted, is_cut_off = threading.Event(), threading.Event()
    handle = SimpleNamespace(reset=SimpleNamespace(remote=lifted.set))
    context = SimpleNamespace(get_synchronization_actor=lambda: handle)
    monkeypatch.setattr(last_report, "TICK_S", 0.01)
    monkeypatch.setattr(last_report, "get_train_context", lambda: context)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    with last_report.BarrierGuard(is_cut_off.is_set):
        assert not lifted.wait(0.1)
        is_cut_off.set()
        assert lifted.wait(60)


@pytest.mark.usefixtures("horovod_alias")
def test_workers_get_the_alias_of_the_driver(monkeypatch):
    config = HvdTrainer(lambda: None).backend_config
    assert [each.__module__ for each in config.before] == ["hvd_cluster.horovod"]
    called = []
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setattr(backend_module, "export_metrics", lambda: None)  # its thread lives as long as the process
    enter({"HOROVOD_RANK": "0"}, [lambda: called.append(os.environ["HOROVOD_RANK"])])
    assert called == ["0"]


def test_ray_train_is_imported_when_it_is_asked_for():
    script = (
        "import sys; from hvd_cluster.ray import *; import hvd_cluster.ray;"
        "print('ray.train' in sys.modules, hasattr(hvd_cluster.ray, 'Trainer'), 'ray.train' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["False"] * 3


def await_snapshot(folder):
    """Return when the controller of Ray Train knows a checkpoint."""
    deadline = time.monotonic() + 60.0
    while not list(Path(folder).rglob("checkpoint_manager_snapshot.json")) and time.monotonic() < deadline:
        time.sleep(0.02)


def watched(train, folder):
    """``train``, which notes the reports of each rank in ``folder``; rank 1 dies after its second one, as soon as the
    controller has noted a checkpoint.
    """

    def watching(config):
        import ray.train

        import hvd_cluster.torch as hvd

        reports, report = [], ray.train.report

        def note(error=None):
            context = ray.train.get_context()
            fact = {
                "rank": context.get_world_rank(),
                "job": os.environ["HOROVOD_JOB_ID"],
                "epochs": [each["epoch"] for each in reports],
                "place": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank()],
                "error": error,
            }
            Path(folder, f"{fact['job']}-{fact['rank']}.json").write_text(json.dumps(fact))

        def noting(metrics, checkpoint=None):
            report(metrics, checkpoint=checkpoint)
            reports.append(metrics)
            note()
            if hvd.rank() == 1 and len(reports) == 2 and reports[0]["epoch"] == 1:
                await_snapshot(folder)
                os.kill(os.getpid(), signal.SIGKILL)

        train.__globals__["report"] = noting
        try:
            train(config)
        except Exception as error:
            note(str(error))
            raise

    return watching


@pytest.mark.timeout(240)
# Ray Data sets its own deprecated options.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.usefixtures("cluster", "nothing_left", "hasty")
def test_the_example_of_the_docs_goes_on_after_a_worker_was_killed(tmp_path):
    [block] = blocks("trainer")
    trainer = execute(block, storage=str(tmp_path / "runs"))["trainer"]
    trainer.train_loop_per_worker = watched(trainer.train_loop_per_worker, str(tmp_path))
    result = trainer.fit()

    assert result.metrics["epoch"] == 5
    assert {path.name for path in Path(result.checkpoint.path).iterdir()} == {"state.pt"}
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    jobs = {fact["job"]: sorted((each for each in facts if each["job"] == fact["job"]), key=rank) for fact in facts}
    first, second = sorted(jobs.values(), key=lambda job: job[0]["epochs"][0])
    assert [fact["rank"] for fact in (*first, *second)] == [0, 1, 0, 1]
    assert all(fact["place"][:2] == [fact["rank"], 2] for fact in (*first, *second))
    assert first[0]["epochs"][:2] == first[1]["epochs"] == [1, 2]
    assert all(fact["epochs"] in ([2, 3, 4, 5], [3, 4, 5]) and not fact["error"] for fact in second)


def counting(folder):
    """An elastic training function. The worker in place 0 dies once; it has counted to 3 by then."""

    def train():
        import ray.train

        from hvd_cluster import elastic
        from hvd_cluster.core import basics
        from hvd_cluster.ops.objects import allgather_object

        place, died = ray.train.get_context().get_world_rank(), Path(folder, "died")

        @elastic.run
        def count(state):
            while state.count < 5:
                pids = allgather_object(os.getpid())
                state.count += 1
                state.commit()
                Path(folder, f"{place}-{state.count}").write_text(json.dumps([pids[basics.rank()], len(set(pids))]))
                ray.train.report({"count": state.count})  # which waits for the other worker, so that it has committed
                if place == 0 and state.count == 3 and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        basics.init()
        count(elastic.ObjectState(count=0))

    return train


@pytest.mark.timeout(240)
# Ray Data sets its own deprecated options.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.usefixtures("cluster", "nothing_left", "hasty")
def test_survivors_keep_their_state_in_an_elastic_job(tmp_path):
    run = RunConfig(storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1))
    folder = tmp_path / "counts"
    folder.mkdir()
    HvdTrainer(counting(str(folder)), scaling_config=ScalingConfig(num_workers=2), run_config=run, elastic=True).fit()
    counts = [[json.loads((folder / f"{place}-{n}").read_text()) for n in range(1, 6)] for place in (0, 1)]
    assert [size for _, size in (*counts[0], *counts[1])] == [2] * 10
    (lost, *_), (survivor, *_) = ([pid for pid, _ in each] for each in counts)
    assert [pid == lost for pid, _ in counts[0]] == [True] * 3 + [False] * 2
    assert [pid == survivor for pid, _ in counts[1]] == [True] * 5


def ending(folder):
    """An elastic training function. The worker in place 0 dies before its last commit, and the other one goes on."""

    def train():
        import tempfile

        import ray.train

        from hvd_cluster import elastic
        from hvd_cluster.core import basics
        from hvd_cluster.ops.objects import allgather_object

        place, died = ray.train.get_context().get_world_rank(), Path(folder, "died")

        @elastic.run
        def count(state):
            while state.count < 2:
                allgather_object(state.count)
                state.count += 1
                if place == 0 and state.count == 2 and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                state.commit()
                with tempfile.TemporaryDirectory() as path:
                    Path(path, f"of-{place}").write_text(str(state.count))
                    ray.train.report({"count": state.count}, checkpoint=ray.train.Checkpoint.from_directory(path))

        basics.init()
        count(elastic.ObjectState(count=0))

    return train


@pytest.mark.timeout(240)
# Ray Data sets its own deprecated options.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.usefixtures("cluster", "nothing_left", "hasty")
def test_the_last_report_is_not_lost_with_a_worker(tmp_path):
    """The survivor mostly has nothing left to do when the successor comes. Checkpoints are in temporary folders."""
    run = RunConfig(storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1))
    trainer = HvdTrainer(
        ending(str(tmp_path)), scaling_config=ScalingConfig(num_workers=2), run_config=run, elastic=True
    )
    result = trainer.fit()
    assert result.metrics["count"] == 2
    files = {path.name: path.read_text() for path in Path(result.checkpoint.path).iterdir()}
    files.pop("of-0", None)  # of a successor that came in time for the last step
    assert files == {"of-1": "2"}


def rank(fact):
    return fact["rank"]
