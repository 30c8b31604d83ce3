"""The pools of ranks that the tests of MXNet share."""

import pytest

from tests.hvd_cluster.mxnet.pool import Pool
from tests.pool import fresh_pools_of, functions_by_value, pools_of


def _initialize():
    import hvd_cluster.mxnet as hvd

    hvd.init()


@pytest.fixture(scope="session")
def pools():
    """See :func:`tests.pool.pools_of`."""
    with pools_of(Pool, _initialize) as get:
        yield get


@pytest.fixture(scope="session", params=[1, 2, 3])
def ranks(request, pools):
    """A pool of each size, or of the sizes a test gives by indirect parameters."""
    return pools(request.param)


@pytest.fixture(scope="session")
def two(pools):
    """The pool of two ranks."""
    return pools(2)


@pytest.fixture
def fresh_pool():
    """See :func:`tests.pool.fresh_pools_of`."""
    with fresh_pools_of(Pool) as get:
        yield get


@pytest.fixture(autouse=True, scope="module")
def by_value(request):
    """See :func:`tests.pool.functions_by_value`."""
    with functions_by_value(request.module):
        yield
