"""The ranks that tests of estimators share."""

from tests.hvd_cluster.torch.pool import Pool
from tests.pool import by_value as by_value  # a fixture
from tests.pool import fixtures

pools, ranks, fresh_pool = fixtures(Pool, sizes=[1, 2])
