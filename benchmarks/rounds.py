"""From one world to the next: from the call to the first finished allreduce, and the same after a rank was lost.

    python -m benchmarks.rounds

Nothing has failed: all ranks call ``hvd_cluster.basics.change_world`` with the next round. After a loss: one rank is
killed, and the survivors go on as a smaller world as soon as they notice; the time from the kill until then is in a
column of its own, that of the slowest survivor.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.measure import add_json_argument, tabulate
from tests.namespaces import HOSTS, Network, Unavailable
from tests.torch.pool import Pool

CHANGES = 50
MILLISECONDS = 1000.0
PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Case:
    """Where the ranks are, and how long a change may take, in ms. ``hosts`` are network namespaces."""

    name: str
    ranks: int
    limit: float
    hosts: tuple[str, ...] = ()
    gloo: bool = False


CASES = (
    Case("shm", 2, 7.0),
    Case("shm", 4, 14.0),
    Case("gloo", 2, 40.0, gloo=True),
    Case("two hosts", 4, 80.0, tuple(host for host in HOSTS for _ in range(2))),
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=CHANGES, help=f"changes of a case (default: {CHANGES})")
    parser.add_argument("--losses", type=int, default=5, help="ranks that are lost in a case (default: 5)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    records = [_measure(case, arguments.changes, arguments.losses) for case in CASES]
    notes = [
        "ms, medians; a loss is repeated with new processes",
        "lost: from the noticed loss; noticed: from the kill",
    ]
    tabulate("From one world to the next", records, arguments, notes)


def _measure(case: Case, changes: int, losses: int) -> dict[str, object]:
    try:
        planned = [seconds for _, seconds in [_launch(case, changes)]]
        lost = [_launch(case, 0, lose=True) for _ in range(losses)]
    except Unavailable as reason:
        return {"case": f"{case.name}: {reason}", "ranks": case.ranks, "limit": case.limit}
    noticed, recovered = zip(*lost, strict=True)
    return {
        "case": case.name,
        "ranks": case.ranks,
        "limit": case.limit,
        "change": statistics.median(planned) * MILLISECONDS,
        "after a loss": statistics.median(recovered) * MILLISECONDS,
        "noticed": statistics.median(noticed) * MILLISECONDS,
        "kept": _verdict(case.limit, [*planned, statistics.median(recovered)]),
    }


def _verdict(limit: float, seconds: Sequence[float]) -> str:
    return "yes" if max(seconds) * MILLISECONDS <= limit else "no"


def _launch(case: Case, changes: int, lose: bool = False) -> tuple[float, float]:
    """New processes: seconds until the slowest survivor noticed a loss (0 without), and of a change of world."""
    variables = {"HOROVOD_CPU_OPERATIONS": "gloo"} if case.gloo else {}
    with ExitStack() as stack:
        network = stack.enter_context(Network()) if case.hosts else None
        pool = Pool(case.ranks, case.hosts or None, variables, network)
        stack.callback(pool.close)
        if not lose:
            return 0.0, max(pool.run(change_worlds, changes))
        pool.run(begin)
        outcomes = pool.outcomes(recover)
    survivors = [outcome.unwrap() for outcome in outcomes if outcome is not None]
    return max(noticed for noticed, _ in survivors), max(seconds for _, seconds in survivors)


def change_worlds(changes: int) -> float:
    """On a rank: the median of ``changes`` changes of world, in seconds."""
    import torch

    import hvd_cluster.torch as hvd
    from collectives.settings import world_from_environment
    from hvd_cluster import basics

    world, tensor, seconds = world_from_environment(os.environ), torch.ones(8), []
    hvd.init()
    for round in range(1, changes + 1):
        hvd.allreduce(tensor, name="before")
        start = time.perf_counter()
        basics.change_world(replace(world, round=round))
        hvd.allreduce(tensor, name="after")
        seconds.append(time.perf_counter() - start)
    hvd.shutdown()
    return statistics.median(seconds)


def begin() -> None:
    """On a rank: start, so that all have started before one is lost."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(8), name="before")


def recover() -> tuple[float, float]:
    """On a survivor: seconds from the kill of the last rank until noticed, and from then in the next world."""
    import torch

    import hvd_cluster.torch as hvd
    from collectives.settings import world_from_environment
    from hvd_cluster import basics
    from hvd_cluster.exceptions import HorovodInternalError

    world = world_from_environment(os.environ)
    topology, tensor = world.topology, torch.ones(8)
    # One clock on one machine; all ranks know the same moment.
    moment = hvd.broadcast(torch.tensor([time.monotonic() + PAUSE_SECONDS], dtype=torch.float64), 0).item()
    if topology.rank == topology.size - 1:
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            hvd.allreduce(tensor, name="x")
    except HorovodInternalError:
        noticed = time.monotonic()
    last_host = topology.cross_rank == topology.cross_size - 1
    smaller = replace(
        topology, size=topology.size - 1, local_size=topology.local_size - (topology.cross_size == 1 or last_host)
    )
    if topology.local_rank == topology.local_size - 1 and topology.cross_size > 1:
        smaller = replace(smaller, cross_size=topology.cross_size - 1)
    basics.change_world(replace(world, round=1, topology=smaller))
    hvd.allreduce(tensor, name="after")
    seconds = time.monotonic() - noticed
    hvd.shutdown()
    return noticed - moment, seconds


if __name__ == "__main__":
    main()
