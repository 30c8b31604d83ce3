"""From one world to the next: from the call to the first finished allreduce, and the same after a rank was lost.

    python -m benchmarks.rounds

Nothing has failed: all ranks call ``hvd_cluster.core.basics.change_world`` with the next round. After a loss: a case
begins with one rank more; that rank is killed, in turns the first and the last, and the survivors go on as a smaller
world as soon as they notice. The time from the kill until the last survivor has the error is in a column of its own.
All times are those of the slowest rank.

The survivors notice a loss before the kernel has torn down the lost process, which takes a core for milliseconds. So
there is one more column, for survivors that pause until that is over. It shows how much of the time is their own.
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
from collectives.api import Topology, World
from executors.job.worlds import assign_ranks
from tests.hvd_cluster.torch.pool import Pool
from tests.namespaces import HOSTS, Network, Unavailable

CHANGES = 50
LOSSES = 10
MILLISECONDS = 1000.0
PAUSE_SECONDS = 0.2
TEARDOWN_SECONDS = 0.05
"""The kernel has torn down a killed rank in less."""
NOTICE_LIMIT = 200.0
"""A recovery starts within this time after the kill, in ms."""


@dataclass(frozen=True)
class Case:
    """The host of each rank, and the time that a change may take, in ms.

    ``losing`` are the hosts of a world that is about to lose a rank. On several hosts each is a network namespace.
    """

    name: str
    hosts: tuple[str, ...]
    losing: tuple[str, ...]
    limit: float
    gloo: bool = False


BOTH = tuple(host for host in HOSTS for _ in range(2))
CASES = (
    Case("shm, 2 ranks", ("here",) * 2, ("here",) * 3, 7.0),
    Case("shm, 4 ranks", ("here",) * 4, ("here",) * 5, 14.0),
    Case("gloo, 2 ranks", ("here",) * 2, ("here",) * 3, 40.0, gloo=True),
    Case("2 x 2 ranks on two hosts", BOTH, BOTH, 80.0),
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--case", choices=names, action="append", help="a case to run (default: all)")
    parser.add_argument("--changes", type=int, default=CHANGES, help=f"changes of a case (default: {CHANGES})")
    parser.add_argument("--losses", type=int, default=LOSSES, help=f"ranks lost in a case (default: {LOSSES})")
    add_json_argument(parser)
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in (arguments.case or names)]
    records = [_measure(case, arguments.changes, arguments.losses) for case in cases]
    notes = [
        f"ms, medians of {arguments.changes} changes and of {arguments.losses} losses, each with new processes",
        "after a loss: from the error of the lost rank on; noticed: from the kill to the last survivor's error",
        f"after its end: as after a loss, {TEARDOWN_SECONDS * MILLISECONDS:.0f} ms later",
    ]
    tabulate("From one world to the next", records, arguments, notes)


def _measure(case: Case, changes: int, losses: int) -> dict[str, object]:
    try:
        change = _change(case, changes)
        noticed, recovered = zip(*(_lose(case, number, 0.0) for number in range(losses)), strict=True)
        undisturbed = [_lose(case, number, TEARDOWN_SECONDS)[1] for number in range(losses)]
    except Unavailable as reason:
        return {"case": f"{case.name}: {reason}", "limit": case.limit}
    after, notice = statistics.median(recovered) * MILLISECONDS, statistics.median(noticed) * MILLISECONDS
    return {
        "case": case.name,
        "change": change * MILLISECONDS,
        "after a loss": after,
        "after its end": statistics.median(undisturbed) * MILLISECONDS,
        "limit": case.limit,
        "noticed": notice,
        "its limit": NOTICE_LIMIT,
        "kept": _verdict([change * MILLISECONDS, after], case.limit, notice),
    }


def _verdict(changes: Sequence[float], limit: float, notice: float) -> str:
    return "yes" if max(changes) <= limit and notice <= NOTICE_LIMIT else "NO"


def _pool(case: Case, hosts: Sequence[str], stack: ExitStack) -> Pool:
    """New processes."""
    several = len(set(hosts)) > 1
    network = stack.enter_context(Network()) if several else None
    pool = Pool(len(hosts), hosts, {"HOROVOD_CPU_OPERATIONS": "gloo"} if case.gloo else {}, network)
    stack.callback(pool.close)
    return pool


def _change(case: Case, changes: int) -> float:
    """Seconds: the median of a change of world."""
    with ExitStack() as stack:
        return max(_pool(case, case.hosts, stack).run(change_worlds, changes))


def _lose(case: Case, number: int, pause: float) -> tuple[float, float]:
    """Seconds from the kill of a rank until the last survivor has noticed it, and of the change of world after that.

    The survivors ``pause`` in between, which does not count.
    """
    victim = 0 if number % 2 else len(case.losing) - 1
    with ExitStack() as stack:
        pool = _pool(case, case.losing, stack)
        pool.run(begin)
        outcomes = pool.outcomes(recover, victim, without(case.losing, victim), pause)
    survivors = [outcome.unwrap() for outcome in outcomes if outcome is not None]
    return max(noticed for noticed, _ in survivors), max(seconds for _, seconds in survivors)


def without(hosts: Sequence[str], victim: int) -> dict[int, Topology]:
    """Pure: the place in the smaller world of each rank but ``victim``, by rank; ``hosts`` are those of all ranks."""
    survivors = [rank for rank in range(len(hosts)) if rank != victim]
    slots = assign_ranks([hosts[rank] for rank in survivors])
    return {
        rank: Topology(slot.rank, slot.size, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size, (), 0)
        for rank, slot in zip(survivors, slots, strict=True)
    }


def change_worlds(changes: int) -> float:
    """On a rank: the median of ``changes`` changes of world, in seconds."""
    import torch

    import hvd_cluster.torch as hvd

    tensor, seconds = torch.ones(8), []
    hvd.init()
    for number in range(1, changes + 1):
        hvd.allreduce(tensor, name="before")
        begin = time.perf_counter()
        _move(replace(_world(), round=number))
        seconds.append(time.perf_counter() - begin)
    hvd.shutdown()
    return statistics.median(seconds)


def _world() -> World:
    from collectives.settings import world_from_environment

    return world_from_environment(os.environ)


def _move(world: World) -> None:
    """Change to ``world``, until the first allreduce there is done."""
    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.core import basics

    basics.change_world(world)
    hvd.allreduce(torch.ones(8), name="after")


def begin() -> None:
    """On a rank: start, so that all have started before one is lost."""
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(8), name="before")


def recover(victim: int, smaller: dict[int, Topology], pause: float) -> tuple[float, float]:
    """On a rank: seconds from the kill of ``victim`` until noticed, and from then on to the first allreduce after."""
    import torch

    import hvd_cluster.torch as hvd
    from hvd_cluster.exceptions import HorovodInternalError

    rank, tensor = hvd.rank(), torch.ones(8)
    # One clock on one machine; all ranks know the same moment.
    moment = hvd.broadcast(torch.tensor([time.monotonic() + PAUSE_SECONDS], dtype=torch.float64), 0).item()
    if rank == victim:
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            hvd.allreduce(tensor, name="x")
    except HorovodInternalError:
        noticed = time.monotonic()
    time.sleep(pause)
    _move(replace(_world(), round=1, topology=smaller[rank]))
    seconds = time.monotonic() - noticed - pause
    hvd.shutdown()
    return noticed - moment, seconds


if __name__ == "__main__":
    main()
