"""``ray job submit``: a script for a cluster of its own, because only this test needs a dashboard."""

import re
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray_cluster import add_node, eventually, free_ports, ray_folder

pytest.importorskip("aiohttp")
from ray.job_submission import JobSubmissionClient

SECONDS = 200

SCRIPT = """
import ray
from model import train

from hvd_cluster.ray import RayExecutor

ray.init()
with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2) as executor:
    print("the ranks returned", executor.run(train, [3]))
"""

MODULE = """
from hvd_cluster.core import basics


def train(steps):
    basics.init()
    print(f"rank {basics.rank()} makes {steps} steps")
    size = basics.size()
    basics.shutdown()
    return size
"""


@pytest.fixture
def dashboard():
    """The address of that of a cluster."""
    port, agent = free_ports(2)
    cluster = Cluster()
    with ray_folder() as folder:
        try:
            add_node(cluster, folder, include_dashboard=True, dashboard_port=port, dashboard_agent_listen_port=agent)
            # As ``ray start`` does: else the script of the job may find another cluster of this machine.
            (Path(folder) / "ray_current_cluster").write_text(cluster.address)
            yield f"http://127.0.0.1:{port}"
        finally:
            cluster.shutdown()


@pytest.mark.timeout(400)
@pytest.mark.leaves("descriptors")  # Ray keeps its connections
def test_a_submitted_script(dashboard, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "model.py").write_text(MODULE)
    client = JobSubmissionClient(dashboard)
    # Ray merges lines that differ in numbers only.
    environment = {"working_dir": str(tmp_path), "env_vars": {"RAY_DEDUP_LOGS": "0"}}
    job = client.submit_job(entrypoint=f"{sys.executable} train.py", runtime_env=environment)
    eventually(lambda: client.get_job_status(job).is_terminal(), SECONDS, pause=0.2)
    output = re.sub(r"\x1b\[\d*m", "", client.get_job_logs(job))
    assert client.get_job_status(job) == "SUCCEEDED", output
    assert "the ranks returned [2, 2]\n" in output
    for rank in (0, 1):
        assert re.search(rf"\(rank {rank} pid=\d+\) rank {rank} makes 3 steps\n", output)
