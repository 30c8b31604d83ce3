"""A rank whose process is stopped inside an operation: every other rank says so, and names it."""

import itertools
import logging
import os
import signal
from pathlib import Path

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.collectives.engine.job import until
from tests.namespaces import HOSTS

CHECK_SECONDS, SHUTDOWN_SECONDS = 1.0, 5.0
STALLS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": str(CHECK_SECONDS),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(SHUTDOWN_SECONDS),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
}
RANKS = range(4)
START_SECONDS = 60.0
"""Twenty operations of 16 MB between two hosts take some seconds on a machine that does nothing else."""
SMALL, PIPELINED = 32, 1 << 24


def reduce_until_error(nbytes, marker):
    """The error that ends the allreduces, the ranks that it names, and the warnings before."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("collectives").addHandler(handler)
    values = torch.ones(nbytes // 4)

    def reduce_for_ever():
        for step in itertools.count():
            hvd.allreduce_(values, op=hvd.Average, name="values")
            if step == 20 and hvd.rank() == 0:
                marker.touch()

    with pytest.raises(hvd.HorovodInternalError) as caught:
        reduce_for_ever()
    logging.getLogger("collectives").removeHandler(handler)
    hvd.shutdown()
    return str(caught.value), caught.value.ranks, lines


def stop(pool, victim, nbytes, marker):
    """The results of :func:`reduce_until_error` on the other ranks when ``victim`` is stopped."""
    survivors = [rank for rank in RANKS if rank != victim]

    def stop_when_running():
        until(marker.exists, START_SECONDS)
        os.kill(pool.processes[victim].pid, signal.SIGSTOP)

    pool.run(hvd.init)
    try:
        return [
            outcome.unwrap()
            for outcome in pool.outcomes(reduce_until_error, nbytes, marker, ranks=survivors, then=stop_when_running)
        ]
    finally:
        pool.processes[victim].kill()


def check(found, victim):
    assert victim == 0 or len({text for text, _, _ in found}) == 1, "rank 0 ends all ranks with one error"
    for text, ranks, lines in found:
        assert ranks == (victim,), text
        assert f"rank {victim} on host" in text
        assert "no answer for" in text
        assert "raise HOROVOD" not in text
        assert any("values" in line for line in lines), "nothing was said while the rank waited"
        reports = [line for line in (text, *lines) if "missing rank" in line]
        assert all(f"missing rank {victim}: " in report for report in reports), reports


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_every_rank_of_two_hosts_names_the_rank_that_was_stopped_in_a_pipeline(fresh_pool, network, victim, tmp_path):
    pool = fresh_pool(4, [host for host in HOSTS for _ in range(2)], STALLS, network=network)
    check(stop(pool, victim, PIPELINED, tmp_path / "running"), victim)


def test_every_rank_names_a_stopped_leader_whose_relay_is_stopped_too(fresh_pool, network, tmp_path):
    pool = fresh_pool(4, [host for host in HOSTS for _ in range(2)], STALLS, network=network)
    check(stop(pool, 2, SMALL, tmp_path / "running"), 2)


@pytest.mark.parametrize(("operations", "victim"), [("shm", 1), ("tcp", 0), ("gloo", 0)])
def test_every_rank_of_one_host_names_the_rank_that_was_stopped(fresh_pool, operations, victim, tmp_path):
    pool = fresh_pool(4, None, STALLS | {"HOROVOD_CPU_OPERATIONS": operations})
    check(stop(pool, victim, SMALL, tmp_path / "running"), victim)


def stop_before_the_decision(victim):
    """The error of a rank that submits a group, and the ranks that it names.

    ``victim`` stops when rank 0 has its part of the group. The decision of rank 0 is larger than a socket holds.
    """
    group = [torch.ones(1)] * 1000, None, "x" * 1000
    if hvd.rank() == victim:
        hvd.grouped_allreduce_async(*group)
    pids = hvd.allgather(torch.tensor([os.getpid()]), name="pids").tolist()
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: is_stopped(pids[victim]))
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.grouped_allreduce(*group)
    hvd.shutdown()
    return str(caught.value), caught.value.ranks


def is_stopped(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_rank_0_answers_while_its_messages_wait_for_a_stopped_rank(fresh_pool):
    """Rank 1 waits inside the operation then, and asks whether rank 0 runs."""
    pool = fresh_pool(3, None, STALLS)
    pool.run(hvd.init)
    try:
        found = [outcome.unwrap() for outcome in pool.outcomes(stop_before_the_decision, 2, ranks=(0, 1))]
    finally:
        pool.processes[2].kill()
    for text, ranks in found:
        assert ranks == (2,), text
