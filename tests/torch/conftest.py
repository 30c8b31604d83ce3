"""The pools of ranks that the torch tests share."""

import cloudpickle
import pytest

import tests.torch.pool
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
    """A pool of each size; all ranks on one host."""
    return pools(request.param)


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


@pytest.fixture(autouse=True, scope="module")
def by_value(request):
    """Functions of the test module travel by value: ranks need not import the tests."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
    assert tests.torch.pool
