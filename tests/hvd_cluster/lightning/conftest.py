"""The pools of ranks that the tests of Lightning share. Without Lightning there are no tests here."""

from importlib.util import find_spec

import pytest

if find_spec("lightning") is None or find_spec("pytorch_lightning") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.hvd_cluster.lightning.pool import Pool
    from tests.pool import by_value as by_value  # a fixture
    from tests.pool import fixtures

    pools, ranks, fresh_pool = fixtures(Pool, sizes=[2])


@pytest.fixture(scope="session")
def pair(pools):
    """Two ranks."""
    return pools(2)


@pytest.fixture(scope="session")
def alone(pools):
    """A world of one."""
    return pools(1)
