"""Ranks that have imported MXNet."""

import warnings
from importlib.util import find_spec

import pytest

from tests import pool


def load():
    """MXNet and its binding; the module that calls this is skipped where there is no MXNet."""
    if find_spec("mxnet") is None:
        pytest.skip("there is no MXNet: make test-mxnet has it", allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a package of the year 2022
        import hvd_cluster.mxnet as hvd

        # isort: split
        import mxnet

        return mxnet, hvd


def _prepare():
    import hvd_cluster.mxnet

    assert hvd_cluster.mxnet


class Pool(pool.Pool):
    """See :class:`tests.pool.Pool`."""

    prepare = staticmethod(_prepare)
