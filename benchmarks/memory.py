"""The resident memory that the engine adds to a rank: at init(), and at the peak of operations on large tensors.

    python -m benchmarks.memory --cases "200 x 1 MB, adasum" --backends shm gloo

Each case has new processes. They fill their tensors first, and everything is counted from there; at the peak the
outputs, which are the user's, are subtracted. "kept" is what stays when the outputs are gone, and "shared" the part of
it that is shared memory. The bound is twice the fusion threshold and 64 MB. All sizes are in MB (2^20 bytes). The C
library is told to give large arrays back at once, for what it keeps is not the engine's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvd_cluster
from benchmarks.measure import add_json_argument, tabulate
from collectives.api import ReduceOp
from collectives.settings import Settings

MEBIBYTE = 1 << 20
BOUND = 2 * Settings().fusion_threshold / MEBIBYTE + 64.0
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """``count`` tensors of ``mebibytes`` each; the outputs on 2 ranks are ``outputs`` times as large, 0: in place."""

    name: str
    operation: str
    count: int
    mebibytes: int
    outputs: float = 0.0
    dtype: str = "float32"


CASES = (
    Case("128 x 1 MB, allreduce in place", "allreduce_async_", 128, 1),
    Case("200 x 1 MB, allreduce in place", "allreduce_async_", 200, 1),
    Case("200 x 1 MB, allreduce in place, bfloat16", "allreduce_async_", 200, 1, dtype="bfloat16"),
    Case("200 x 1 MB, allreduce", "allreduce_async", 200, 1, 1.0),
    Case("1 x 256 MB, allreduce in place", "allreduce_async_", 1, 256),
    Case("200 x 1 MB, allgather", "allgather_async", 200, 1, 2.0),
    Case("1 x 128 MB, allgather", "allgather_async", 1, 128, 2.0),
    Case("200 x 1 MB, reducescatter", "reducescatter_async", 200, 1, 0.5),
    Case("1 x 256 MB, reducescatter", "reducescatter_async", 1, 256, 0.5),
    Case("200 x 1 MB, broadcast in place", "broadcast_async_", 200, 1),
    Case("200 x 1 MB, alltoall", "alltoall_async", 200, 1, 1.0),
    Case("128 x 1 MB, adasum", "adasum", 128, 1),
    Case("200 x 1 MB, adasum", "adasum", 200, 1),
    Case("1 x 256 MB, adasum", "adasum", 1, 256),
)


def measure(case: Case) -> dict[str, float]:
    """Runs on every rank; MB that were added at init(), at the peak and for good, the user's own not counted."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    dtype = getattr(torch, case.dtype)
    elements = case.mebibytes * MEBIBYTE // dtype.itemsize
    tensors = [torch.ones(elements // 1024, 1024, dtype=dtype) for _ in range(case.count)]
    before = status()
    hvd.init()
    after = status()
    start = submitter(case.operation)
    reset_peak()
    for _ in range(ROUNDS):
        _exchange(start, tensors)
    end = status()
    CDLL(None).malloc_trim(0)
    kept = status()
    hvd.barrier()  # because a shutdown ends the engine on all ranks
    hvd.shutdown()
    outputs = case.outputs * case.count * case.mebibytes
    return {
        "init": after["VmRSS"] - before["VmRSS"],
        "peak": end["VmHWM"] - before["VmRSS"] - outputs,
        "kept": kept["VmRSS"] - before["VmRSS"],
        "shared": kept["RssShmem"] - before["RssShmem"],
    }


def submitter(operation: str) -> Callable[[Any, str], int]:
    """A function that submits a tensor under a name, and returns the handle."""
    import hvd_cluster.torch as hvd

    if operation == "adasum":
        return lambda tensor, name: hvd.allreduce_async_(tensor, op=ReduceOp.ADASUM, name=name)
    if operation == "broadcast_async_":
        return lambda tensor, name: hvd.broadcast_async_(tensor, 0, name=name)
    function = getattr(hvd, operation)
    return lambda tensor, name: function(tensor, name=name)


def _exchange(start: Callable[[Any, str], int], tensors: list[Any]) -> None:
    import hvd_cluster.torch as hvd

    handles = [start(tensor, f"memory.{number}") for number, tensor in enumerate(tensors)]
    outputs = [hvd.synchronize(handle) for handle in handles]
    del outputs


def status() -> dict[str, float]:
    """The memory lines of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = [line.split() for line in lines if line.startswith(("Vm", "Rss"))]
    return {field[0].rstrip(":"): int(field[1]) / 1024 for field in fields}


def reset_peak() -> None:
    """Let VmHWM start again from VmRSS (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def launch(ranks: int, backend: str, case: Case) -> dict[str, Any]:
    """A row: of all ranks the one whose peak is highest."""
    environment = {"HOROVOD_CPU_OPERATIONS": backend, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    results = hvd_cluster.run(measure, (case,), num_proc=ranks, env=environment)
    worst = max(results, key=lambda result: result["peak"])
    verdict = "yes" if worst["peak"] <= BOUND else "no"
    return {"case": case.name, "backend": backend, **worst, f"at most {BOUND:g}": verdict}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"], help="HOROVOD_CPU_OPERATIONS of each run")
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="CASE", help="default: all")
    add_json_argument(parser)
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in arguments.cases]
    rows = [launch(2, backend, case) for backend in arguments.backends for case in cases]
    tabulate("MB that the engine adds to a rank, of 2", rows, arguments)


if __name__ == "__main__":
    from benchmarks.memory import main as importable_main

    importable_main()
