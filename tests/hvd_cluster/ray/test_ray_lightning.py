"""Lightning on the workers of a Ray cluster."""

from importlib.util import find_spec

import pytest

from hvd_cluster.ray import RayExecutor
from tests.hvd_cluster.lightning.jobs import require_training, train

# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed"),
    pytest.mark.usefixtures("cluster", "nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(240),
]


def test_lightning_trains_under_an_executor():
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2) as executor:
        require_training(executor.run(train, [5]))
