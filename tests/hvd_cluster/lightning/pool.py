"""Ranks that have imported Lightning."""

from tests import pool
from tests.collectives.backends.members import preload

preload("hvd_cluster.lightning")  # which takes 3 s of a processor, in both packages


def _prepare():
    import torch

    import hvd_cluster.lightning

    assert hvd_cluster.lightning
    torch.set_num_threads(1)


class Pool(pool.Pool):
    """See :class:`tests.pool.Pool`."""

    prepare = staticmethod(_prepare)
