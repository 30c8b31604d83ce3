"""Ranks that have imported TensorFlow."""

import os

from tests import pool
from tests.collectives.backends.members import preload

preload("tensorflow")  # which takes 5 s of a processor


def _prepare():
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", TF_NUM_INTEROP_THREADS="2")
    import tensorflow

    import hvd_cluster.tensorflow

    assert hvd_cluster.tensorflow
    tensorflow.config.threading.set_intra_op_parallelism_threads(1)


class Pool(pool.Pool):
    """See :class:`tests.pool.Pool`."""

    prepare = staticmethod(_prepare)
