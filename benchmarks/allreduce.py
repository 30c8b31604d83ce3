"""Allreduce through the public torch API, with its negotiation, against torch.distributed on Gloo, and against MPI.

    python -m benchmarks.allreduce --ranks 2 4 --sizes 32 1M 64M

All sum float32 in place. Ours and Gloo take turns in the same processes. MPI, where mpi4py and mpirun are installed,
sums NumPy arrays of the same sizes in processes of its own: launches of it and of the others take turns.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import hvd_cluster
from benchmarks import mpi
from benchmarks.measure import (
    Row,
    add_launches_argument,
    add_report_arguments,
    combine,
    interleave,
    meeting_file,
    report,
    row,
    torch_gloo,
)
from benchmarks.sizes import label, parse_size, repeats_for

__all__ = ["measure", "parse_size"]


def measure(sizes: list[int], tensors: int, scale: float, path: str) -> list[Row]:
    """Runs on every rank; the rows of this rank."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch_gloo(hvd.rank(), hvd.size(), path)
    rows = [_single(nbytes, scale) for nbytes in sizes]
    if tensors:
        rows.append(_many(tensors, 20 << 10, scale))
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return rows


def _single(nbytes: int, scale: float) -> Row:
    import torch

    import hvd_cluster.torch as hvd

    ours, peer = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    sides = {
        "ours": lambda: hvd.allreduce_(ours, op=hvd.Average, name=f"benchmark.{nbytes}"),
        "peer": lambda: torch.distributed.all_reduce(peer, op=torch.distributed.ReduceOp.AVG),
    }
    seconds = interleave(sides, repeats_for(nbytes, scale), 10)
    assert torch.equal(ours, peer), "the sides disagree about the result"
    return row(label(nbytes), hvd.size(), "us", seconds, 1e6)


def _many(count: int, nbytes: int, scale: float) -> Row:
    import torch

    import hvd_cluster.torch as hvd

    ours = [torch.ones(nbytes // 4) for _ in range(count)]
    peer = [torch.ones(nbytes // 4) for _ in range(count)]

    def run_ours() -> None:
        handles = [hvd.allreduce_async_(tensor, name=f"many.{i}") for i, tensor in enumerate(ours)]
        for handle in handles:
            hvd.synchronize(handle)

    def run_peer() -> None:
        average = torch.distributed.ReduceOp.AVG
        works = [torch.distributed.all_reduce(tensor, op=average, async_op=True) for tensor in peer]
        for work in works:
            work.wait()

    seconds = interleave({"ours": run_ours, "peer": run_peer}, max(3, int(10 * scale)), 3)
    return row(f"{count} x {label(nbytes)}, async", hvd.size(), "us", seconds, 1e6)


def launch(ranks: int, arguments: argparse.Namespace, notes: list[str]) -> list[Row]:
    """Ours and Gloo, then MPI; ``notes`` gets the reason why there is no MPI, which is then left out."""
    given = (arguments.sizes, arguments.tensors, arguments.scale)
    rows: list[Row] = hvd_cluster.run(measure, (*given, meeting_file()), num_proc=ranks)[0]
    if notes:
        return rows
    try:
        return [
            replace(entry, mpi=seconds * 1e6) for entry, seconds in zip(rows, mpi.launch(ranks, *given), strict=True)
        ]
    except mpi.Unavailable as reason:
        notes.append(f"MPI is not measured: {reason}")
        return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[32, 64 << 10, 1 << 20, 16 << 20, 64 << 20],
        help="bytes of the tensors (default: 32 64K 1M 16M 64M)",
    )
    parser.add_argument("--tensors", type=int, default=200, help="tensors of 20 KB in the asynchronous case; 0: none")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of repetitions (default: 1)")
    add_launches_argument(parser, 3)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    notes: list[str] = []
    rows: list[Row] = []
    for ranks in arguments.ranks:
        launches = [launch(ranks, arguments, notes) for _ in range(arguments.launches)]
        rows += map(combine, zip(*launches, strict=True))
    report("allreduce: ours, torch.distributed on Gloo (peer) and MPI", rows, arguments, notes)


if __name__ == "__main__":
    from benchmarks.allreduce import main as importable_main

    importable_main()
