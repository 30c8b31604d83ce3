"""A rank keeps the others waiting: ``hvdrun -np 3 --stall-check-warning-time-seconds 1 python examples/stalls.py``.

Rank 0 reports why rank 1 does not come: it is in a loop, sleeps, is stopped, or has called another collective. After a
few seconds rank 1 comes, and the job goes on. ``--cause loop`` shows one of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time

import torch

import hvd_cluster.torch as hvd

LATE = 1
CAUSES = ("loop", "sleep", "stop", "other")
RANKS = 3


def loop(seconds: float) -> None:
    """Compute."""
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total += 1


def sleep(seconds: float) -> None:
    """Wait for nothing."""
    time.sleep(seconds)


def stop(seconds: float) -> None:
    """Stop this process; another one lets it go on."""
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


def keep_waiting(cause: str, seconds: float) -> None:
    """Do something else than a collective."""
    if cause == "loop":
        loop(seconds)
    elif cause == "sleep":
        sleep(seconds)
    else:
        stop(seconds)


def call_another(seconds: float) -> None:
    """Rank 1 waits for rank 2, which waits in the same collective as rank 0."""
    pair = hvd.add_process_set([LATE, RANKS - 1])
    if hvd.rank() == LATE:
        hvd.allreduce(torch.ones(10), name="statistics", process_set=pair)
    gradient = hvd.allreduce_async(torch.ones(10), name="gradient")
    if hvd.rank() == RANKS - 1:
        time.sleep(seconds)
        hvd.allreduce(torch.ones(10), name="statistics", process_set=pair)
    hvd.synchronize(gradient)


def stall(cause: str, seconds: float) -> None:
    """Let rank 1 be late for an allreduce."""
    if cause == "other":
        call_another(seconds)
        return
    for _ in range(10):
        hvd.allreduce(torch.ones(10), name="gradient")
    if hvd.rank() == LATE:
        keep_waiting(cause, seconds)
    hvd.allreduce(torch.ones(10), name="gradient")


def main() -> None:
    """Run the causes that the command line names, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cause", choices=CAUSES, action="append", help="why rank 1 is late; all of them by default")
    parser.add_argument("--seconds", type=float, default=2.5, help="how late it is")
    options = parser.parse_args()

    hvd.init()
    if hvd.size() < RANKS and "other" in (options.cause or CAUSES):
        parser.error(f"this needs {RANKS} ranks, not {hvd.size()}; start it with hvdrun -np {RANKS}")
    for cause in options.cause or CAUSES:
        if hvd.rank() == 0:
            print(f"--- {cause}", flush=True)
        stall(cause, options.seconds)


if __name__ == "__main__":
    main()
