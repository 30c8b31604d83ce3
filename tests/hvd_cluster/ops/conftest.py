"""The pool of ranks that the tests of operations share."""

import pytest

from tests import pool
from tests.pool import by_value as by_value  # a fixture
from tests.pool import fixtures


def _prepare():
    import hvd_cluster.core.basics

    assert hvd_cluster.core.basics


class Pool(pool.Pool):
    """See :class:`tests.pool.Pool`."""

    prepare = staticmethod(_prepare)


pools, ranks, fresh_pool = fixtures(Pool, sizes=[3])


@pytest.fixture(scope="session")
def two(pools):
    """The pool of two ranks."""
    return pools(2)


@pytest.fixture(scope="session")
def apart(pools):
    """Two ranks, as if each had a host of its own."""
    return pools(2, hosts=["a", "b"])
