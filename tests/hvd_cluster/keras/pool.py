"""Ranks that have imported Keras on one of its backends."""

import multiprocessing

from tests import pool
from tests.collectives.backends.members import forking_context, preload

preload("tensorflow")  # which takes 5 s of a processor, and imports Keras on its own backend


def _prepare():
    import keras

    import hvd_cluster.keras

    assert hvd_cluster.keras
    if keras.backend.backend() == "tensorflow":
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(1)


class Pool(pool.Pool):
    """See :class:`tests.pool.Pool`."""

    prepare = staticmethod(_prepare)

    @classmethod
    def on(cls, backend):
        """Makes pools of ranks whose Keras runs on ``backend``."""
        environment = {
            "KERAS_BACKEND": backend,
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_NUM_INTEROP_THREADS": "2",
        }
        kind = type(cls.__name__, (cls,), {"context": staticmethod(_context_of(backend))})
        return lambda size, hosts: kind(size, hosts, environment)


def _context_of(backend):
    """Keras has chosen its backend when it is imported."""
    return forking_context if backend == "tensorflow" else lambda: multiprocessing.get_context("spawn")
