"""The pools of ranks that the Keras tests share: one for each backend that is installed."""

from importlib.util import find_spec

import pytest

from tests.hvd_cluster.elastic.conftest import start as start  # a fixture
from tests.hvd_cluster.keras.pool import Pool
from tests.pool import by_value as by_value  # a fixture
from tests.pool import pools_of

collect_ignore_glob = [] if find_spec("keras") else ["test_*.py"]

BACKENDS = [name for name in ("tensorflow", "torch", "jax") if find_spec(name)]


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    """The name of a backend."""
    return request.param


@pytest.fixture(scope="session")
def ranks(backend):
    """Two ranks on ``backend``, on one host."""
    with pools_of(Pool.on(backend)) as get:
        yield get(2)
