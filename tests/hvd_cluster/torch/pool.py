"""Ranks that have imported torch."""

from tests import pool


def _prepare():
    import torch

    import hvd_cluster.torch

    assert hvd_cluster.torch
    torch.set_num_threads(1)


class Pool(pool.Pool):
    """See :class:`tests.pool.Pool`."""

    prepare = staticmethod(_prepare)
