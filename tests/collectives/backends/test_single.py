from __future__ import annotations

import numpy as np
import pytest

from collectives.api import DType, HorovodInternalError, InvalidRequestError, ReduceOp, ShutDownError
from collectives.backends.single import SingleBackend
from collectives.kernels.reduction import reduction
from tests.collectives.backends.matrix import run_matrix
from tests.collectives.backends.members import group_of


def test_matrix():
    run_matrix(SingleBackend(group_of(1)), 0, 1)


def test_scaling_a_bool_is_refused():
    flags = np.ones(3, bool)
    with pytest.raises(InvalidRequestError, match=r"scaled .* by 0\.5"):
        SingleBackend(group_of(1)).allreduce_arrays([flags], [flags], reduction(DType.BOOL, ReduceOp.SUM, 0.5))


def test_abort_and_close():
    backend, error = SingleBackend(group_of(1)), HorovodInternalError("told to stop")
    backend.abort(error)
    backend.close()
    with pytest.raises(HorovodInternalError) as caught:
        backend.barrier()
    assert caught.value is error


def test_closed():
    backend = SingleBackend(group_of(1))
    backend.close()
    backend.close()
    with pytest.raises(ShutDownError):
        backend.broadcast_bytes(np.ones(1, np.uint8), np.ones(1, np.uint8), 0)
