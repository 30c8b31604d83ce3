"""A rank that comes late to each step is named on rank 0, by real ranks; one that does not is not."""

import logging
import time

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.engine import counters
from hvd_cluster.core import basics

STEPS = 30
DELAYS = 0.05, 0.2, 0.8
"""In seconds, tried in this order. On a busy machine all ranks come late, and a short delay does not stand out."""


def train(delayed, steps, seconds=0.0):
    """The stragglers after so many steps, and the lines about them; the ``delayed`` rank sleeps in each step."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("collectives.stalls.straggler_reports")
    logger.addHandler(handler)
    gradients = [torch.ones(size) for size in (100, 100_000)]
    for step in range(steps + 1):
        if hvd.rank() == delayed and step:
            time.sleep(seconds)
        hvd.grouped_allreduce_(gradients, name="gradients")
    logger.removeHandler(handler)
    return basics.engine().stragglers, lines


def lack_cores(rank):
    """From now on, as far as its schedule tells, ``rank`` waits for a core all the time, and no other rank does."""
    counters.queued_seconds = time.monotonic if hvd.rank() == rank else lambda: 0.0


def check(pool, size, delayed):
    for seconds in DELAYS:
        found = pool.run(train, delayed, STEPS, seconds)
        if found[0][0]:
            break
    [straggler], [line] = found[0]
    assert (straggler.rank, straggler.process_set, straggler.cause.value) == (delayed, 0, "late submission")
    assert straggler.seconds >= seconds / 2
    assert line.startswith(f"rank {delayed} on host ")
    assert "is a straggler" in line
    assert found[1:] == [((), [])] * (size - 1)
    return line


@pytest.mark.parametrize(("size", "delayed"), [(2, 1), (4, 0)])
def test_a_late_rank_of_one_host_is_named_in_time(fresh_pool, size, delayed):
    pool = fresh_pool(size)
    pool.run(hvd.init)
    assert pool.run(train, None, 5 * STEPS) == [((), [])] * size
    check(pool, size, delayed)


@pytest.mark.parametrize(("lacking", "advice"), [(1, "has other work"), (0, "look at its data and its computation")])
def test_a_late_rank_without_a_core_is_told_from_one_that_has_one(fresh_pool, lacking, advice):
    """Another rank without a core does not excuse the late rank."""
    pool = fresh_pool(2)
    pool.run(hvd.init)
    pool.run(lack_cores, lacking)
    assert advice in check(pool, 2, 1)


@pytest.mark.parametrize("hosts", [("one", "two"), ("one", "one", "two", "two")])
def test_a_late_rank_of_another_host_is_named_in_time(fresh_pool, hosts):
    """Two ranks on Gloo; four on the hierarchical backend, with a relay on the other host."""
    pool = fresh_pool(len(hosts), list(hosts))
    pool.run(hvd.init)
    check(pool, len(hosts), len(hosts) - 1)
