"""The matrix of all backends on a real GPU, whose ranks share it; then the loss of a rank."""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import pytest

from collectives.api import DType, HorovodInternalError, ReduceOp
from collectives.backends.nccl.cupy_device import shared_device
from collectives.backends.nccl.joining import NcclJoining
from tests.backends.device import Uploading
from tests.backends.matrix import run_matrix
from tests.backends.members import Processes, group_of
from tests.backends.offers import meet
from tests.gpu.arrays import Arrays

FAULT_SECONDS = 5.0


def connect(member):
    arrays = Arrays(shared_device(member.rank % int(os.environ["HVD_CHECK_GPUS"])))
    backend = meet(NcclJoining(group_of(member.size, member.rank), 30.0, member.rank), member.store, 60.0)
    return backend, arrays


def matrix(member):
    backend, arrays = connect(member)
    run_matrix(Uploading(backend, arrays), member.rank, member.size, member.size + 1)
    backend.close()
    return "done"


def abort(member):
    """All ranks but the first stop calling; the first one aborts, and its kernel ends in time."""
    backend, arrays = connect(member)
    tensor = arrays.upload(np.ones(1000, np.float32), DType.FLOAT32)
    assert backend.allreduce([tensor], [tensor], ReduceOp.SUM).wait(60.0)
    member.meet_others("before")
    began = time.monotonic()
    end = backend.allreduce([tensor], [tensor], ReduceOp.SUM) if member.rank == 0 else None
    backend.abort(HorovodInternalError("told to stop"))
    if end is not None:
        with pytest.raises(HorovodInternalError, match="told to stop"):
            end.wait(FAULT_SECONDS)
    backend.close()
    assert time.monotonic() - began < 2 * FAULT_SECONDS
    return "done"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    import torch

    os.environ["HVD_CHECK_GPUS"] = str(torch.cuda.device_count())
    for body in (matrix, abort):
        with Processes(ranks, body) as processes:
            assert processes.results() == ["done"] * ranks


if __name__ == "__main__":
    main()
