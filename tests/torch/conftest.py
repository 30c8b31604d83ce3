"""The pools of ranks that the torch tests share."""

import cloudpickle
import pytest

from tests.namespaces import Network, Unavailable
from tests.torch.pool import Pool


def _initialize():
    import hvd_cluster.torch as hvd

    hvd.init()


@pytest.fixture(scope="session")
def pools():
    """``pools(size)`` or ``pools(size, hosts)``: initialized ranks that later tests use again."""
    made = {}

    def get(size, hosts=None):
        key = (size, tuple(hosts or ()))
        if key not in made:
            made[key] = Pool(size, hosts)
            made[key].run(_initialize)
        return made[key]

    yield get
    for pool in made.values():
        pool.close()


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
    """``fresh_pool(size, ...)``: a pool for one test, for those that kill ranks or end engines."""
    made = []

    def get(*args, **kwargs):
        made.append(Pool(*args, **kwargs))
        return made[-1]

    yield get
    for pool in made:
        pool.close()


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
    """Functions of the test module travel by value: ranks need not import the tests."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
