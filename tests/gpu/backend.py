"""The matrix of all backends on a real GPU, whose ranks share it; and an abort."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

import numpy as np
import pytest

from collectives.api import DType, HorovodInternalError, ReduceOp
from collectives.backends.nccl.bootstrap import NcclBootstrap
from collectives.backends.nccl.cupy_device import shared_device
from tests.collectives.backends.device import Uploading
from tests.collectives.backends.matrix import checks
from tests.collectives.backends.members import Processes, group_of
from tests.collectives.backends.offers import meet
from tests.gpu.arrays import Arrays
from tests.gpu.rank import prepare

FAULT_SECONDS = 5.0
CHECK_SECONDS = 40.0
"""For one part of the matrix on all ranks; the first one starts the processes and compiles the kernels."""


def arrays_of(rank):
    """Those of the GPU of ``rank``."""
    return Arrays(shared_device(rank % int(os.environ["HVD_CHECK_GPUS"])))


def connect(member):
    prepare()
    arrays = arrays_of(member.rank)
    backend = meet(NcclBootstrap(group_of(member.size, member.rank), 30.0, member.rank), member.store, 60.0)
    assert not backend.absence, backend.absence
    return backend, arrays


def matrix(member, names):
    """The parts ``names``; each rank tells the name of a part when that is over."""
    backend, arrays = connect(member)
    for name, check in checks(member.size + 1).items():
        if name in names:
            check(Uploading(backend, arrays))
            member.tell(name)
    backend.close()


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


def failed_parts(ranks, names, body):
    """Those of the parts ``names`` that failed in ``body``. After a failure new processes go on with the next part."""
    left, failed = list(names), []
    while left:
        with Processes(ranks, partial(body, names=left)) as processes:
            wrong = next((name for name in left if not has_passed(processes, ranks, name)), None)
        left = left[left.index(wrong) + 1 :] if wrong else []
        failed += [wrong] if wrong else []
    return failed


def has_passed(processes, ranks, name):
    """Whether ``name`` has passed on all ranks; reports what those tell that fail."""
    began, errors = time.monotonic(), []
    for rank in range(ranks):
        try:
            assert processes.hear(rank, 2.0 if errors else CHECK_SECONDS) == name
        except (AssertionError, EOFError) as error:
            errors.append(f"rank {rank}: {error!r:.100}\n{error}\n")
    sys.stdout.write(f"  {name}: {'FAILED' if errors else 'passed'}, {time.monotonic() - began:.1f} s\n")
    sys.stdout.writelines(errors)
    return not errors


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["matrix", "abort"])
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    import torch

    os.environ["HVD_CHECK_GPUS"] = str(torch.cuda.device_count())
    if arguments.part == "matrix":
        sys.exit(bool(failed_parts(arguments.ranks, checks(), matrix)))
    with Processes(arguments.ranks, abort) as processes:
        assert processes.results() == ["done"] * arguments.ranks


if __name__ == "__main__":
    main()
