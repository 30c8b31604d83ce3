"""The pools of ranks that the TensorFlow tests share."""

from importlib.util import find_spec

from tests.hvd_cluster.tensorflow.pool import Pool
from tests.pool import by_value as by_value  # a fixture
from tests.pool import fixtures

collect_ignore_glob = [] if find_spec("tensorflow") else ["test_*.py"]

pools, ranks, fresh_pool = fixtures(Pool, sizes=[1, 3])
