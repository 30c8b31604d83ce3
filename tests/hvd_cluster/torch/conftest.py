"""The pools of ranks that the torch tests share."""

import pytest

from tests.hvd_cluster.torch.pool import Pool
from tests.networks import network as network  # a fixture
from tests.pool import by_value as by_value  # a fixture
from tests.pool import fixtures

pools, ranks, fresh_pool = fixtures(Pool, sizes=[1, 3])


@pytest.fixture(scope="session")
def two_hosts(pools):
    """Two ranks that believe to be on different hosts: the tcp backend, and control over TCP."""
    return pools(2, ["one", "two"])


@pytest.fixture(scope="session")
def two_hosts_of_two(pools):
    """Four ranks on two hosts."""
    return pools(4, ["one", "one", "two", "two"])


@pytest.fixture(scope="session")
def uneven_hosts(pools):
    """Two ranks on a host, and one on another."""
    return pools(3, ["one", "one", "two"])
