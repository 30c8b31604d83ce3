"""Ranks that have imported Keras on one of its backends."""

from tests import pool


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
        return lambda size, hosts: cls(size, hosts, environment)
