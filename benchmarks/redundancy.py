"""The cost of a commit of a sharded optimizer on two hosts, with and without copies on the other host.

    python -m benchmarks.redundancy
    python -m benchmarks.redundancy --rate 1gbit --ranks 1

The hosts are network namespaces of this machine, joined by a link of a limited rate: root only, and it needs iproute2.
A step is one of AdamW on the MLP of benchmarks.training: 784-2048-2048-10, 23 MB of parameters and twice as much state.
The sides train in the same processes, turn by turn: no commit; a commit after each step with ``redundancy=0``, which
keeps the parts of a rank on its own host; and with ``redundancy=1``, which sends them to the other host, too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.commits import with_commits
from benchmarks.measure import add_json_argument, interleave, tabulate
from benchmarks.training import build, stepper
from tests.hvd_cluster.torch.pool import Pool
from tests.namespaces import HOSTS, WIRE, Network, Unavailable

SIDES = {"no commit": None, "redundancy=0": 0, "redundancy=1": 1}


def measure(widths: list[int], batch: int, repeats: int) -> dict[str, list[float]]:
    """Runs on every rank; for each side the seconds of each step, as this rank sees it."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    torch.manual_seed(2 + hvd.rank())
    images, labels = torch.randn(batch, widths[0]), torch.randint(0, widths[-1], (batch,))
    sides = {side: _side(side, widths, images, labels) for side in SIDES}
    seconds = interleave(sides, repeats, 5)
    hvd.shutdown()
    return seconds


def _side(side: str, widths: list[int], images: Any, labels: Any) -> Callable[[], None]:
    import torch

    import hvd_cluster.torch as hvd

    model = build(widths)
    named = [(f"{side}.{name}", value) for name, value in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.001), named, sharded=True, redundancy=SIDES[side]
    )
    train = stepper(model, optimizer, images, labels)
    if SIDES[side] is None:
        return train
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.sync()
    return with_commits(train, state, state.commit)


def record(seconds: list[dict[str, list[float]]], arguments: argparse.Namespace) -> dict[str, object]:
    """Medians over all steps, on the slowest rank, in milliseconds, and their ratios to those without commit."""
    medians = {side: max(statistics.median(of_rank[side]) for of_rank in seconds) * 1e3 for side in SIDES}
    bare = medians["no commit"]
    return {
        "rate": arguments.rate,
        "ranks a host": arguments.ranks,
        **{f"{side}, ms": value for side, value in medians.items()},
        **{f"{side} / none": value / bare for side, value in medians.items() if side != "no commit"},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="processes on each host (default: 1)")
    parser.add_argument("--rate", default="10gbit", help="of the link, as tc writes it (default: 10gbit)")
    parser.add_argument("--widths", type=int, nargs="+", default=[784, 2048, 2048, 10], help="layers of the MLP")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of five steps of each side (default: 10)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    hosts = [host for host in HOSTS for _ in range(arguments.ranks)]
    try:
        with Network(arguments.rate) as network:
            pool = Pool(len(hosts), hosts, {"GLOO_SOCKET_IFNAME": WIRE}, network)
            try:
                seconds = pool.run(measure, arguments.widths, arguments.batch_size, arguments.repeats)
            finally:
                pool.close()
    except Unavailable as reason:
        parser.exit(1, f"no hosts in network namespaces: {reason}\n")
    tabulate("a step with a commit of a sharded optimizer, medians", [record(seconds, arguments)], arguments)


if __name__ == "__main__":
    main()
