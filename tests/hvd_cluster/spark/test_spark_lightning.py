"""Lightning in two executors of Spark."""

from importlib.util import find_spec

import pytest

from hvd_cluster.spark import run
from tests.hvd_cluster.lightning.jobs import require_training, train

# Spark keeps its own processes and connections.
pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed"),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(240),
]


def test_lightning_trains_in_executors(spark):
    require_training(run(train, (5,), num_proc=2))
