"""A Keras model on the workers of a Ray cluster."""

from importlib.util import find_spec

import pytest

from hvd_cluster.ray import RayExecutor
from tests.hvd_cluster.keras.jobs import require_training, train

# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = [
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.usefixtures("cluster", "nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(240),
]


def test_keras_trains_under_an_executor():
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2) as executor:
        require_training(executor.run(train, [5]))
