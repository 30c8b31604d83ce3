"""``ray job submit``: a script for a cluster of its own, because only this test needs a dashboard."""

import re
import sys

import pytest
from ray.cluster_utils import Cluster
from ray_cluster import add_node, eventually, free_ports, ray_folder

pytest.importorskip("aiohttp")
from ray.job_submission import JobSubmissionClient

SECONDS = 200

SCRIPT = """
import ray

from hvd_cluster import basics
from hvd_cluster.ray import RayExecutor


def train(steps):
    basics.init()
    print(f"rank {basics.rank()} makes {steps} steps")
    size = basics.size()
    basics.shutdown()
    return size


ray.init()
with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2) as executor:
    print("the ranks returned", executor.run(train, [3]))
"""


@pytest.fixture
def dashboard():
    """The address of that of a cluster."""
    port, agent = free_ports(2)
    cluster = Cluster()
    with ray_folder() as folder:
        try:
            add_node(cluster, folder, include_dashboard=True, dashboard_port=port, dashboard_agent_listen_port=agent)
            yield f"http://127.0.0.1:{port}"
        finally:
            cluster.shutdown()


@pytest.mark.timeout(400)
@pytest.mark.leaves("descriptors")  # Ray keeps its connections
def test_a_submitted_script(dashboard, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    client = JobSubmissionClient(dashboard)
    # Without a working_dir, whose package Ray 2.60 sometimes loses before the workers get it. Ray merges lines that
    # differ in numbers only.
    job = client.submit_job(entrypoint=f"{sys.executable} {script}", runtime_env={"env_vars": {"RAY_DEDUP_LOGS": "0"}})
    eventually(lambda: client.get_job_status(job).is_terminal(), SECONDS, pause=0.2)
    output = re.sub(r"\x1b\[\d*m", "", client.get_job_logs(job))
    assert client.get_job_status(job) == "SUCCEEDED", output
    assert "the ranks returned [2, 2]\n" in output
    for rank in (0, 1):
        assert re.search(rf"\(rank {rank} pid=\d+\) rank {rank} makes 3 steps\n", output)
