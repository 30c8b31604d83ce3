"""Fixtures around a Ray cluster. Without Ray there are no tests here."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    collect_ignore_glob = ["test_ray_*.py"]


@pytest.fixture(scope="session")
def cluster():
    """A cluster of two nodes, with this process as its driver."""
    from ray_cluster import running_cluster

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def nothing_left(cluster):
    """Every placement group and every worker is gone after the test, and their resources are free."""
    from ray_cluster import all_are_free, eventually, groups_left, workers_left

    yield
    eventually(lambda: not groups_left() and not workers_left() and all_are_free(), 60)
