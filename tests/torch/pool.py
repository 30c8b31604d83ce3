"""Ranks that have imported torch."""

import os

from tests import pool


def _prepare():
    # Or torch.compile would start processes that stay as long as the rank.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    import hvd_cluster.torch

    assert hvd_cluster.torch
    torch.set_num_threads(1)


class Pool(pool.Pool):
    """See :class:`tests.pool.Pool`."""

    prepare = staticmethod(_prepare)
