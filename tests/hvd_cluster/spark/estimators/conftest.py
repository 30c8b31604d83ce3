"""The ranks that tests of estimators share. Without PySpark or torch there are no tests here."""

from importlib.util import find_spec

if find_spec("pyspark") is None or find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.hvd_cluster.torch.pool import Pool
    from tests.pool import by_value as by_value  # a fixture
    from tests.pool import fixtures

    pools, ranks, fresh_pool = fixtures(Pool, sizes=[1, 2])
