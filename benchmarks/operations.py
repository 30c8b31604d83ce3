"""All collectives through the public torch API, with their negotiation, against torch.distributed on Gloo, and MPI.

    python -m benchmarks.operations                                                  # everything, about 20 minutes
    python -m benchmarks.operations --operations allreduce --dtypes float32 float16  # a part
    python -m benchmarks.operations --scale 0.2 --launches 1 --sizes 1M 64M          # coarser, and faster
    python -m benchmarks.operations --backend tcp                                    # over TCP within this host

Ours and Gloo take turns in the same processes. Both sides do allreduce and broadcast in place. Our other operations
return new tensors, where Gloo writes to tensors that exist already. The size of a case is that of the largest tensor of
a rank: the result of an allgather, the input of a reducescatter. Floats are averaged, integers are summed.

A time is that of a call in a row of many: the time of the row divided by their number, on the slowest rank, as the
median of the rows. The column "single calls" compares the medians of single calls of rank 0, which leave out what a
slow call now and then costs, and the work that the root of a broadcast leaves to others.

MPI, where mpi4py and mpirun are installed, reduces NumPy arrays of float32 of the same sizes in processes of its own:
launches of it and of the others take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import hvd_cluster
from benchmarks import mpi
from benchmarks.measure import (
    Row,
    add_launches_argument,
    add_report_arguments,
    combine,
    interleave,
    rendezvous_file,
    report,
    row,
    slowest,
    torch_gloo,
)
from benchmarks.sizes import label, parse_size, turns_for

__all__ = ["Case", "main", "measure"]

GOAL = 0.5
"""The time of each case is to be at most this fraction of Gloo's."""
SMALL = 64 << 10
TCP_GOAL, TCP_SMALL_GOAL = 0.9, 0.2
"""The same over TCP within a host, from SMALL bytes on and up to there."""

MANY_BYTES = 20 << 10
REDUCING = ("allreduce", "reducescatter")
DTYPES = ("float32", "float16", "bfloat16", "int64")

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """``operation`` on ``nbytes`` of ``dtype``."""

    operation: str
    dtype: str
    nbytes: int

    @property
    def title(self) -> str:
        """The name of the case in the table."""
        return f"{self.operation} {self.dtype}, {label(self.nbytes)}"


def measure(cases: Sequence[Case], tensors: int, scale: float, path: str) -> list[Row]:
    """Runs on every rank; the rows of this rank: one for each case, and one for ``tensors`` small tensors, if any."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch_gloo(hvd.rank(), hvd.size(), path)
    rows = [_single(case, scale) for case in cases]
    if tensors:
        rows.append(_many(tensors, scale))
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return rows


def _single(case: Case, scale: float) -> Row:
    import torch

    import hvd_cluster.torch as hvd

    ours, peer = _SIDES[case.operation](case)
    assert torch.equal(ours(), peer()), f"{case.title}: the sides disagree about the result"
    turns = turns_for(case.nbytes, scale)
    seconds = interleave({"ours": ours, "peer": peer}, *turns)
    return row(case.title, hvd.size(), "us", seconds, 1e6, turns.calls)


def _tensor(case: Case, shares: int = 1) -> Any:
    """A tensor of a ``shares``-th of the case's bytes, with small numbers that differ between ranks."""
    import torch

    import hvd_cluster.torch as hvd

    dtype = getattr(torch, case.dtype)
    count = case.nbytes // dtype.itemsize // shares
    return torch.arange(count).remainder(8).add(hvd.rank()).to(dtype)


def _averages(case: Case) -> bool:
    return case.dtype not in ("int64", "int32", "uint8")


def _allreduce(case: Case) -> tuple[Call, Call]:
    from torch import distributed

    import hvd_cluster.torch as hvd

    mine, peers = _tensor(case), _tensor(case)
    average = _averages(case)
    op, peer_op = (hvd.Average, distributed.ReduceOp.AVG) if average else (hvd.Sum, distributed.ReduceOp.SUM)

    def peer() -> Any:
        distributed.all_reduce(peers, op=peer_op)
        return peers

    return lambda: hvd.allreduce_(mine, op=op, name=case.title), peer


def _allgather(case: Case) -> tuple[Call, Call]:
    import torch
    from torch import distributed

    import hvd_cluster.torch as hvd

    source = _tensor(case, hvd.size())
    result = torch.empty(source.numel() * hvd.size(), dtype=source.dtype)
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

    def peer() -> Any:
        gather(result, source)
        return result

    return lambda: hvd.allgather(source, name=case.title), peer


def _broadcast(case: Case) -> tuple[Call, Call]:
    from torch import distributed

    import hvd_cluster.torch as hvd

    mine, peers = _tensor(case), _tensor(case)

    def peer() -> Any:
        distributed.broadcast(peers, 0)
        return peers

    return lambda: hvd.broadcast_(mine, 0, name=case.title), peer


def _alltoall(case: Case) -> tuple[Call, Call]:
    import torch
    from torch import distributed

    import hvd_cluster.torch as hvd

    source = _tensor(case)
    result = torch.empty_like(source)

    def peer() -> Any:
        distributed.all_to_all_single(result, source)
        return result

    return lambda: hvd.alltoall(source, name=case.title), peer


def _reducescatter(case: Case) -> tuple[Call, Call]:
    import torch
    from torch import distributed

    import hvd_cluster.torch as hvd

    source = _tensor(case)
    result = torch.empty(source.numel() // hvd.size(), dtype=source.dtype)
    average = _averages(case)
    op, peer_op = (hvd.Average, distributed.ReduceOp.AVG) if average else (hvd.Sum, distributed.ReduceOp.SUM)
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

    def peer() -> Any:
        scatter(result, source, op=peer_op)
        return result

    return lambda: hvd.reducescatter(source, op=op, name=case.title), peer


_SIDES: dict[str, Callable[[Case], tuple[Call, Call]]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}


def _many(count: int, scale: float) -> Row:
    import torch

    import hvd_cluster.torch as hvd

    ours = [torch.ones(MANY_BYTES // 4) for _ in range(count)]
    peer = [torch.ones(MANY_BYTES // 4) for _ in range(count)]

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
    return row(f"allreduce float32, {count} x {label(MANY_BYTES)}, async", hvd.size(), "us", seconds, 1e6)


def _cases(operations: Iterable[str], dtypes: Sequence[str] | None, sizes: Sequence[int]) -> list[Case]:
    """All combinations; where no dtypes are given, operations that only move bytes are measured with the first."""
    return [
        Case(operation, dtype, nbytes)
        for operation in operations
        for dtype in dtypes or (DTYPES if operation in REDUCING else DTYPES[:1])
        for nbytes in sizes
    ]


def _launch(ranks: int, cases: Sequence[Case], tensors: int, scale: float, backend: str, notes: list[str]) -> list[Row]:
    """Ours through ``backend``, and Gloo, then MPI. Without MPI, which is left out then, ``notes`` gets the reason."""
    rows = slowest(
        hvd_cluster.run(
            measure, (cases, tensors, scale, rendezvous_file()), num_proc=ranks, env={"HOROVOD_CPU_OPERATIONS": backend}
        )
    )
    comparable = [index for index, case in enumerate(cases) if (case.operation, case.dtype) == ("allreduce", "float32")]
    if notes or not comparable:
        return rows
    try:
        seconds = mpi.launch(ranks, [cases[index].nbytes for index in comparable], tensors, scale)
    except mpi.Unavailable as reason:
        notes.append(f"MPI is not measured: {reason}")
        return rows
    for index, median in zip([*comparable, len(cases)], seconds, strict=False):
        rows[index] = replace(rows[index], mpi=median * 1e6)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[4 << 10, 1 << 20, 16 << 20, 64 << 20],
        help="bytes of the tensors (default: 4K 1M 16M 64M)",
    )
    parser.add_argument("--operations", nargs="+", choices=list(_SIDES), default=list(_SIDES), help="default: all")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        help=f"default: {' '.join(DTYPES)} where elements are combined, {DTYPES[0]} where they only move",
    )
    parser.add_argument(
        "--tensors", type=int, default=0, help="tensors of 20 KB that are reduced asynchronously, too (default: 0)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of repetitions (default: 1)")
    parser.add_argument(
        "--backend", default="auto", choices=["auto", "shm", "tcp", "gloo"], help="ours (default: auto)"
    )
    add_launches_argument(parser, 2)
    add_report_arguments(parser)
    return parser


def main(presets: Sequence[str] = ()) -> None:
    """The command line; ``presets`` are options that come before it, so that it overrides them."""
    arguments = _parser().parse_args([*presets, *sys.argv[1:]])
    cases = _cases(arguments.operations, arguments.dtypes, arguments.sizes)
    notes: list[str] = []
    rows: list[Row] = []
    for ranks in arguments.ranks:
        given = (ranks, cases, arguments.tensors, arguments.scale, arguments.backend, notes)
        launches = [_launch(*given) for _ in range(arguments.launches)]
        combined = map(combine, zip(*launches, strict=True))
        goals = chain((_goal(case.nbytes, arguments.backend) for case in cases), repeat(GOAL))
        rows += [replace(entry, goal=goal) for entry, goal in zip(combined, goals, strict=False)]
    report("ours and torch.distributed on Gloo (peer)", rows, arguments, notes)


def _goal(nbytes: int, backend: str) -> float:
    if backend != "tcp":
        return GOAL
    return TCP_SMALL_GOAL if nbytes <= SMALL else TCP_GOAL


if __name__ == "__main__":
    from benchmarks.operations import main as importable_main

    importable_main()
