"""The ranks that tests of estimators share. Without PySpark or torch there are no tests here."""

from contextlib import ExitStack
from importlib.util import find_spec

import pytest

if find_spec("pyspark") is None or find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.hvd_cluster.torch.pool import Pool
    from tests.pool import by_value as by_value  # a fixture
    from tests.pool import fixtures

    pools, ranks, fresh_pool = fixtures(Pool, sizes=[1, 2])


@pytest.fixture(scope="session")
def keras_pools():
    """``keras_pools(backend)``: two ranks whose Keras runs on it, for all files with such tests."""
    from tests.hvd_cluster.keras.pool import Pool
    from tests.pool import pools_of

    made = {}
    with ExitStack() as stack:

        def get(backend):
            if backend not in made:
                made[backend] = stack.enter_context(pools_of(Pool.on(backend)))(2)
            return made[backend]

        yield get
