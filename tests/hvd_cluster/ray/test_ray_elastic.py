"""Elastic jobs: workers and nodes are killed, come and go, while the others train."""

import os
import re
import signal
import time

import pytest
import ray
from elastic_run import ElasticRun
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_cluster import add_node

from executors.api import PlacementError

PREEMPTION = 2  # a reason that Ray never rejects

pytest.importorskip("torch")
# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def start(cluster, tmp_path):
    """Start a job, which ends with the test."""
    runs = []

    def start(**arguments):
        runs.append(ElasticRun(tmp_path, **arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_survivors_go_on_a_newcomer_replaces_the_lost_and_one_that_gets_sigterm_hands_over(start, caplog):
    caplog.set_level("INFO", "executors.driver.driver")
    job = start(min_workers=1, num_workers=3, max_workers=3)
    first = job.world(3)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = job.world(2)
    assert [each["worker"] for each in second] == [first[0]["worker"], first[2]["worker"]]
    third = job.world(3, without=[first[1]["worker"]])
    assert [each["pid"] for each in third[:2]] == [each["pid"] for each in second]
    os.kill(third[0]["pid"], signal.SIGTERM)
    fourth = job.world(2, without=[first[1]["worker"], third[0]["worker"]])
    values = job.end()
    assert [value[1:] for value in values] == [(0, 0), (1, 0)]
    assert (
        [value[0] for value in values] == [each["worker"] for each in fourth] == [each["worker"] for each in third[1:]]
    )
    [line] = [text for text in caplog.messages if text.startswith("world 3: ")]
    assert re.match(r"world 3: 2 ranks, rank 0 on host \S+ left, resumed after", line)


def test_an_exception_ends_the_job_as_itself(start):
    job = start(min_workers=1, num_workers=2, max_workers=2, fails="worker-1")
    with pytest.raises(ValueError, match="bad batch of worker-1") as caught:
        job.result()
    assert caught.value.__cause__.rank == 1
    assert "in go" in caught.value.__cause__.traceback


def test_nodes_come_drain_and_die(cluster, start, caplog, tmp_path):
    caplog.set_level("INFO", "executors.driver.driver")
    folder, home = cluster.head_node._ray_params.temp_dir, cluster.head_node.node_id
    [other] = [node.node_id for node in cluster.list_all_nodes() if node.node_id != home]
    job = start(min_workers=1, num_workers=2, max_workers=3, label_selector={"ray.io/node-id": f"!in({other})"})
    first = job.world(2)
    assert {each["node"] for each in first} == {home}

    drained = add_node(cluster, folder)
    three = job.world(3)
    assert [each["pid"] for each in three[:2]] == [each["pid"] for each in first]
    assert three[2]["node"] == drained.node_id
    gone = [three[2]["worker"]]
    hold = tmp_path / f"hold.{gone[0]}"
    hold.touch()  # it comes to no commit before the deadline
    drain(cluster, drained, seconds=60)
    drain(cluster, drained, seconds=1)
    job.world(2, gone)
    hold.unlink()
    cluster.remove_node(drained, allow_graceful=True)

    killed = add_node(cluster, folder)
    three = job.world(3, gone)
    assert three[2]["node"] == killed.node_id
    cluster.remove_node(killed, allow_graceful=False)
    job.world(2, [*gone, three[2]["worker"]])

    assert [value[1:] for value in job.end()] == [(0, 0), (1, 0)]
    told = [record.message for record in caplog.records]
    # The numbers depend on whether the job hears of the second notice before it has acted upon the first one.
    lines = [re.sub(r"world \d+: | on host \S+|, resumed .*", "", text) for text in told if ", resumed after" in text]
    assert lines[-4:-1] == ["3 ranks, rank 2 joined", "2 ranks, rank 2 left", "3 ranks, rank 2 joined"]
    [late] = [text for text in told if "came to no commit since the notice" in text]
    assert late.startswith("rank 2 on host ")
    assert lines[-1].startswith("2 ranks, rank 2 lost (its Ray node has died (")


def test_too_few_workers(start, monkeypatch, caplog):
    monkeypatch.setattr("executors.agents.ray.elastic.WARN_S", 0.1)
    job = start(min_workers=5, elastic_timeout=1)
    with pytest.raises(PlacementError) as caught:
        job.result()
    text = str(caught.value)
    assert "the job has 0 of at least 5 workers" in text
    assert "within the elastic timeout of 1 s" in text
    assert "missing: 1 of 5 workers with 1 CPU each" in text
    [warning] = [record.message for record in caplog.records if record.name == "executors.agents.ray.elastic"]
    assert warning.startswith("the cluster has no room for 5 workers\n  requested: 5 workers with 1 CPU each")
    assert warning.endswith("waiting up to 1 s for it (elastic_timeout)")


@ray.remote(num_cpus=1)
def trial():
    """An elastic job, such as that of a trial of Ray Tune: worker-1 dies, and the training ends with its successor.

    Returns what a job that is too large for the group raises, and the group of each worker, beside that of this task.
    """
    from ray.util import get_current_placement_group

    from hvd_cluster.ray import RayExecutor

    def train():
        from hvd_cluster import elastic
        from hvd_cluster.core import basics
        from hvd_cluster.ops.objects import allgather_object

        own = os.environ["HOROVOD_WORKER_ID"]

        @elastic.run
        def count(state):
            while "worker-2" not in allgather_object(own):
                time.sleep(0.05)
                state.commit()
                if own == "worker-1":
                    os.kill(os.getpid(), signal.SIGKILL)

        basics.init()
        count(elastic.ObjectState())
        return own, get_current_placement_group().id.hex()

    settings = RayExecutor.create_settings(timeout_s=120)
    arguments = {"cooldown_range": (1, 1), "elastic_timeout": 120}
    with RayExecutor(settings, min_workers=3, **arguments) as executor:
        try:
            text = str(executor.run(train))
        except ValueError as error:
            text = str(error)
    with RayExecutor(settings, min_workers=1, num_workers=2, **arguments) as executor:
        return text, executor.run(train), get_current_placement_group().id.hex()


@pytest.mark.usefixtures("cluster")
def test_in_a_placement_group_workers_start_and_are_replaced_in_its_bundles():
    group = placement_group([{"CPU": 1}] * 3)
    try:
        inside = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        text, values, own = ray.get(trial.options(scheduling_strategy=inside).remote(), timeout=300)
    finally:
        remove_placement_group(group)
    assert text.startswith("min_workers is 3, but the current placement group has room for 2 workers with 1 CPU each")
    assert [worker for worker, _ in values] == ["worker-0", "worker-2"]
    assert {each for _, each in values} == {own}


def drain(cluster, node, seconds):
    """Tell Ray that ``node`` will be preempted in so many seconds."""
    deadline = int((time.time() + seconds) * 1000)
    client = ray._raylet.GcsClient(address=cluster.gcs_address)
    accepted, reason = client.drain_node(node.node_id, PREEMPTION, "the test wants it", deadline)
    assert accepted, reason
