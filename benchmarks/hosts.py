"""Allreduce of two hosts with two ranks each, through the public torch API, against torch.distributed on Gloo.

    python -m benchmarks.hosts --sizes 16M
    python -m benchmarks.hosts --sizes 16M --rate 10gbit
    python -m benchmarks.hosts --sizes 16M --operation reducescatter

The hosts are network namespaces of this machine, joined by a link of a limited rate: root only, and it needs iproute2.
Both sides average float32 tensors of the same size in the same processes, turn by turn. At best, S bytes take
8 S / rate in an allreduce, as each host has to send as many, and half of that in a reducescatter.
"""

from __future__ import annotations

import argparse

from benchmarks.measure import Row, add_report_arguments, rendezvous_file, report, slowest
from benchmarks.operations import Case, measure
from benchmarks.sizes import parse_size
from tests.hvd_cluster.torch.pool import Pool
from tests.namespaces import HOSTS, RATE, WIRE, Network, Unavailable


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes on each host (default: 2)")
    operations = ("allreduce", "reducescatter")
    parser.add_argument("--operation", choices=operations, default="allreduce", help="(default: allreduce)")
    parser.add_argument("--rate", default=RATE, help=f"of the link, as tc writes it (default: {RATE})")
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+", default=[32, 64 << 10, 1 << 20, 16 << 20], help="bytes of the tensors"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of repetitions (default: 1)")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    rows: list[Row] = []
    hosts = [host for host in HOSTS for _ in range(arguments.ranks)]
    try:
        with Network(arguments.rate) as network:
            pool = Pool(len(hosts), hosts, {"GLOO_SOCKET_IFNAME": WIRE}, network)
            try:
                for nbytes in arguments.sizes:
                    case = Case(arguments.operation, "float32", nbytes)
                    rows += slowest(pool.run(measure, [case], 0, arguments.scale, rendezvous_file()))
            finally:
                pool.close()
    except Unavailable as reason:
        parser.exit(1, f"no hosts in network namespaces: {reason}\n")
    report(
        f"{arguments.operation} of two hosts at {arguments.rate}: ours and torch.distributed on Gloo", rows, arguments
    )


if __name__ == "__main__":
    main()
