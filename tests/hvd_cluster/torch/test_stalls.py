"""A rank that others wait for: the report of rank 0 tells why it does not come. Ranks are processes."""

import contextlib
import logging
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import hvd_cluster.torch as hvd
from tests.hvd_cluster.torch.pool import Pool

STALLS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
ALL = (0, 1, 2)
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "stalls.py")


@pytest.fixture(scope="module")
def stalling():
    """Ranks that report early."""
    pool = Pool(len(ALL), None, STALLS)
    pool.run(hvd.init)
    yield pool
    pool.close()


class WokenError(Exception):
    """Ends a sleep or a loop."""


@contextlib.contextmanager
def wakeable():
    """SIGUSR1 ends the block."""

    def wake(*_):
        raise WokenError

    before = signal.signal(signal.SIGUSR1, wake)
    with contextlib.suppress(WokenError):
        yield
    signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def hearing(texts, signal_number, process):
    """The first warning of this rank with all ``texts``, as a list; with it, ``process`` gets the signal."""
    found = []

    def hear(record):
        if not found and all(text in record.getMessage() for text in texts):
            found.append(record.getMessage())
            os.kill(process, signal_number)

    handler = logging.Handler()
    handler.emit = hear
    logging.getLogger("collectives").addHandler(handler)
    yield found
    logging.getLogger("collectives").removeHandler(handler)


def spin():
    total = 0
    while True:
        total += 1


def sleep():
    time.sleep(1000)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def stall(kind, victim, members, texts, signal_number=signal.SIGUSR1):
    """What rank 0 reports with ``texts`` while ``victim`` is in ``kind()`` and the other ``members`` wait for it."""
    everyone = len(members) == hvd.size()
    members = hvd.global_process_set if everyone else hvd.add_process_set(members)
    if not members.included():
        return hvd.remove_process_set(members)
    ids = hvd.allgather(torch.tensor([os.getpid()]), process_set=members).tolist()
    with hearing(texts, signal_number, ids[victim]) as found:
        for _ in range(10):  # later ones bypass the coordinator
            hvd.allreduce(torch.ones(3), name="loss", process_set=members)
        if hvd.rank() == victim:
            with wakeable():
                kind()
        hvd.allreduce(torch.ones(3), name="loss", process_set=members)
    if not everyone:
        hvd.remove_process_set(members)
    return found


def lines(reports):
    """The report of rank 0, line by line."""
    return [line.strip() for line in reports[0][0].splitlines()]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("members", [ALL, (0, 1)])
def test_a_rank_in_an_endless_loop(stalling, victim, members):
    found = lines(stalling.run(stall, spin, victim, members, ["computes", "in spin: "]))
    assert f"rank {victim} computes, perhaps in an endless loop: its main thread uses a processor" in "\n".join(found)
    assert "Its last collective is 'allreduce.loss'" in "\n".join(found)
    assert any("in spin: " in line for line in found)


@pytest.mark.parametrize(("victim", "members"), [(0, ALL), (1, ALL), (1, (0, 1))])
def test_a_rank_that_sleeps(stalling, victim, members):
    found = lines(stalling.run(stall, sleep, victim, members, ["is blocked", "in sleep: "]))
    assert f"rank {victim} is blocked in a call that is not a collective, such as a sleep" in "\n".join(found)
    assert any(line.endswith("in sleep: time.sleep(1000)") for line in found)


@pytest.mark.parametrize("members", [ALL, (0, 1)])
def test_a_stopped_rank(stalling, members):
    found = "\n".join(lines(stalling.run(stall, stop, 1, members, ["rank 1 does not answer"], signal.SIGCONT)))
    process = stalling.processes[1].pid
    assert f"rank 1 does not answer. Process {process} is stopped (state T)" in found
    assert f"`kill -CONT {process}` lets it go on" in found


def wait_elsewhere(texts):
    """What rank 0 reports with ``texts`` while rank 1 waits for rank 2, in another collective than the others."""
    pair = hvd.add_process_set([1, 2])
    ids = hvd.allgather(torch.tensor([os.getpid()])).tolist()
    with hearing(texts, signal.SIGUSR1, ids[2]) as found:
        if hvd.rank() == 1:
            hvd.allreduce(torch.ones(3), name="mean", process_set=pair)
        loss = hvd.allreduce_async(torch.ones(3), name="loss")
        if hvd.rank() == 2:
            with wakeable():
                sleep()
            hvd.allreduce(torch.ones(3), name="mean", process_set=pair)
        hvd.synchronize(loss)
    hvd.remove_process_set(pair)
    return found


def test_a_rank_that_waits_in_another_collective(stalling):
    found = "\n".join(lines(stalling.run(wait_elsewhere, ["rank 1 waits itself", "in sleep: "])))
    assert "rank 1 waits itself, for 'allreduce.mean' on process set 1, submitted" in found
    assert 'in wait_elsewhere: hvd.allreduce(torch.ones(3), name="mean", process_set=pair)' in found
    assert "rank 2 is blocked" in found


def run_example(*options):
    """The warnings of this rank while the example runs."""
    warnings, given = [], sys.argv
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("collectives").addHandler(handler)
    sys.argv = [EXAMPLE, *options]
    try:
        runpy.run_path(EXAMPLE, run_name="__main__")
    finally:
        sys.argv = given
        logging.getLogger("collectives").removeHandler(handler)
    return warnings


def test_the_example(stalling):
    """In the ranks of the other tests, which report after half a second."""
    found = "\n".join(stalling.run(run_example, "--cause", "loop", "--seconds", "2")[0])
    assert "rank 1 computes, perhaps in an endless loop" in found
    assert "in loop: " in found
