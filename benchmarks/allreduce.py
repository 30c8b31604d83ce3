"""Allreduce through the public torch API, with its negotiation, against torch.distributed on Gloo, interleaved.

    python -m benchmarks.allreduce --ranks 2 4 --sizes 32 1M 64M

Both sides sum float32 tensors of the same size in the same processes, turn by turn.
"""

from __future__ import annotations

import argparse

import hvd_cluster
from benchmarks.measure import Row, add_report_arguments, interleave, meeting_file, report, row, torch_gloo

SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "32", "64K" or "1M"; a multiple of 4, since the elements are float32."""
    unit = SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or not int(digits) or int(digits) * unit % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give a multiple of 4 such as 32, 64K or 1M")
    return int(digits) * unit


def label(nbytes: int) -> str:
    """The opposite of :func:`parse_size`."""
    for suffix, unit in reversed(SUFFIXES.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {suffix}B"
    return f"{nbytes} B"


def repeats_for(nbytes: int, scale: float) -> int:
    """Rounds of ten calls: many for small tensors, a few for large ones."""
    return max(3, int(scale * (40 if nbytes <= 1 << 20 else 5)))


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
    add_report_arguments(parser)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        given = (arguments.sizes, arguments.tensors, arguments.scale, meeting_file())
        rows += hvd_cluster.run(measure, given, num_proc=ranks)[0]
    report("allreduce: ours and torch.distributed on Gloo", rows, arguments)


if __name__ == "__main__":
    from benchmarks.allreduce import main as importable_main

    importable_main()
