"""Ranks with Keras on each of its backends, and elastic jobs."""

import importlib.util
import os

import pytest

from tests import pool
from tests.elastic.conftest import start as start  # a fixture
from tests.pool import functions_by_value

BACKENDS = ("tensorflow", "torch", "jax")


def available(backend):
    return importlib.util.find_spec("keras") is not None and importlib.util.find_spec(backend) is not None


def _prepare():
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    import keras

    import hvd_cluster.keras

    assert hvd_cluster.keras
    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]


def _initialize():
    import hvd_cluster.keras as hvd

    hvd.init()


class Pool(pool.Pool):
    """Ranks that have imported Keras; the variable KERAS_BACKEND says which one."""

    prepare = staticmethod(_prepare)


@pytest.fixture(scope="session", params=BACKENDS)
def ranks(request):
    """Three initialized ranks on each backend, which all tests share."""
    if not available(request.param):
        pytest.skip(f"{request.param} is not installed")
    made = Pool(3, environment={"KERAS_BACKEND": request.param})
    try:
        made.run(_initialize)
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True, scope="module")
def by_value(request):
    """See :func:`tests.pool.functions_by_value`."""
    with functions_by_value(request.module):
        yield
