"""The live page of jobs on Ray."""

import pytest

from executors.api import ExecutorError
from hvd_cluster.ray import RayExecutor, executor
from tests.live_page import link_file, looker

# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = pytest.mark.leaves("descriptors", "processes")


@pytest.mark.parametrize(
    "numbers", [{"num_workers": 2}, {"min_workers": 2, "max_workers": 2}], ids=["fixed", "elastic"]
)
def test_all_workers_are_on_the_page(cluster, numbers, monkeypatch, tmp_path):
    look = looker(link_file(monkeypatch, tmp_path))
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), dashboard=True, **numbers) as workers:
        shown, _ = workers.run(look)
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert all(len(rank["host"]) < 60 for rank in shown["ranks"]), "a name for readers"


def test_a_client_has_no_page(cluster, monkeypatch):
    monkeypatch.setattr(executor, "is_client", lambda: True)
    with pytest.raises(ExecutorError, match="the driver serves the live page, and a ray:// client is none"):
        RayExecutor(RayExecutor.create_settings(), num_workers=1, dashboard=True).start()


def test_what_is_no_address():
    with pytest.raises(ValueError, match="dashboard is 'here', but must be True or an address and a port"):
        RayExecutor(RayExecutor.create_settings(), num_workers=1, dashboard="here")
