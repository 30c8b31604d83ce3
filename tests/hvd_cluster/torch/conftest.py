"""The pools of ranks that the torch tests share."""

import pytest

from tests.hvd_cluster.torch.pool import Pool
from tests.namespaces import Network, Unavailable
from tests.pool import fresh_pools_of, functions_by_value, pools_of


def _initialize():
    import hvd_cluster.torch as hvd

    hvd.init()


@pytest.fixture(scope="session")
def pools():
    """See :func:`tests.pool.pools_of`."""
    with pools_of(Pool, _initialize) as get:
        yield get


@pytest.fixture(scope="session", params=[1, 2, 3, 4])
def ranks(request, pools):
    """A pool of each size, or of the sizes a test gives by indirect parameters; all ranks on one host."""
    return pools(request.param)


@pytest.fixture(scope="session")
def two_hosts(pools):
    """Two ranks that believe to be on different hosts: the tcp backend, and control over TCP."""
    return pools(2, ["one", "two"])


@pytest.fixture
def fresh_pool():
    """See :func:`tests.pool.fresh_pools_of`."""
    with fresh_pools_of(Pool) as get:
        yield get


@pytest.fixture
def network():
    """Two hosts in network namespaces of this machine, for one test."""
    try:
        with Network() as network:
            yield network
    except Unavailable as reason:
        pytest.skip(f"no hosts in network namespaces: {reason}")


@pytest.fixture(autouse=True, scope="module")
def by_value(request):
    """See :func:`tests.pool.functions_by_value`."""
    with functions_by_value(request.module):
        yield
