"""The pools of ranks that the tests of MXNet share."""

import pytest

from tests.hvd_cluster.mxnet.pool import Pool
from tests.pool import by_value as by_value  # a fixture
from tests.pool import fixtures

pools, ranks, fresh_pool = fixtures(Pool, sizes=[1, 3])


@pytest.fixture(scope="session")
def two(pools):
    """The pool of two ranks."""
    return pools(2)
