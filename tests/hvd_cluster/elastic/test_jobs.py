"""Whole elastic jobs on this host: ranks are lost, leave and come, and the training goes on."""

import os
import re
import signal

import psutil
import pytest

from hvd_cluster import run
from tests.hvd_cluster.elastic.jobs import PATIENCE_SECONDS, assert_agreement

pytestmark = pytest.mark.timeout(300)

COOLDOWN = ("--blacklist-cooldown-range", 1, 1)
# How the process ended is not waited for longer than a second.
LOST = r"\((was killed by signal 9 \(SIGKILL; the host may have run out of memory\)|ended)\)"
# A rank may stop inside an operation, or before it has submitted one.
SHORT = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "3",
    "HOROVOD_HEARTBEAT_SECONDS": "2",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
}


def offer(folder, slots):
    """Let the script of :func:`offered` find so many slots of this host."""
    (folder / "next").write_text(f"localhost:{slots}\n")
    (folder / "next").rename(folder / "hosts")


def offered(folder):
    return "--host-discovery-script", f"cat {folder / 'hosts'}"


@pytest.mark.parametrize(("victim", "survivors"), [(0, (1, 2)), (2, (0, 1))])
def test_a_killed_rank_is_lost_and_the_others_go_on(start, victim, survivors):
    job = start(3)
    job.kill(victim)
    job.until_training(*survivors)
    assert job.end() == 0, job.log
    assert_agreement(job, *survivors)
    (change,) = job.changes
    assert re.fullmatch(rf"world 1: 2 ranks, rank {victim} on host localhost lost {LOST}", change)
    assert ", 0 steps lost" in job.log


def test_two_ranks_killed_at_once(start):
    job = start(3)
    job.kill(0, 2)
    job.until_training(1)
    assert job.end() == 0, job.log
    assert_agreement(job, 1)
    # If the second kill comes late, the other two were in a world of their own before it.
    assert re.match(r"world \d: 1 rank, ", job.changes[-1])
    assert len(re.findall(rf"rank \d on host localhost lost {LOST}", " ".join(job.changes))) == 2


def test_a_rank_killed_during_the_recovery_of_another(start):
    job = start(4)
    job.kill(3)
    job.until(lambda: "has ended" in job.log or (len(job.notes(0)) > 0 and "world 1" in job.log), "the loss is known")
    job.kill(1)
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)


@pytest.mark.parametrize("notice", ["SIGTERM", "drain()"])
def test_a_rank_that_is_asked_to_end_leaves_after_a_step_and_is_no_failure(start, notice):
    job = start(3, "--reset-limit", 0)
    if notice == "SIGTERM":
        job.kill(1, number=signal.SIGTERM)
    else:
        job.want("drain", 1)
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)
    assert job.changes == ["world 1: 2 ranks, rank 1 on host localhost left"]
    assert "rank 1 on host localhost was asked to end; it leaves at one of its next commits" in job.log


def test_a_lost_rank_is_replaced_after_the_cooldown(start):
    job = start(2, *COOLDOWN)
    job.kill(1)
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)
    assert job.changes[-1] == "world 2: 2 ranks, rank 1 on host localhost joined"


def test_a_discovery_script_lets_the_job_grow_and_shrink(start, tmp_path):
    offer(tmp_path, 1)
    job = start(1, *offered(tmp_path))
    offer(tmp_path, 3)
    job.until_training(0, 1, 2)
    # On a slow machine the two newcomers come one after the other, in any order. The later one leaves.
    stays = min(1, 2, key=job.rank)
    offer(tmp_path, 2)
    job.until_training(0, stays)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, stays)
    assert re.fullmatch(r"world [23]: 2 ranks, rank 2 on host localhost left", job.changes[-1])


def test_a_rank_that_ends_early_does_not_end_the_others(start):
    job = start(3)
    job.want("leave", 1)
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert {"worker-0", "worker-2"} < set(job.results())
    assert job.changes == ["world 1: 2 ranks, rank 1 on host localhost ended with exit code 0"]


@pytest.mark.parametrize("is_repaired", [True, False], ids=["in the function", "after it"])
def test_a_rank_that_is_killed_when_another_is_done(start, tmp_path, is_repaired):
    """In the function, the rest goes on; after it, nobody can do its work."""
    job = start(3)
    job.want("leave", 1)
    job.until_training(0, 2)
    if not is_repaired:
        job.want("linger", 0)
        (tmp_path / "end").touch()
        job.until(lambda: set(job.results()) == {"worker-0", "worker-1", "worker-2"}, "the function has returned")
    job.kill(0)
    if is_repaired:
        job.until_training(2)
    assert job.end() == (0 if is_repaired else 137), job.log
    assert ("hvdrun: rank 0 on localhost was killed by signal 9 (SIGKILL; " in job.log) is not is_repaired


def test_an_exception_of_the_user_ends_the_job_with_rank_and_traceback(start):
    job = start(3, *COOLDOWN)
    job.want("raise", 1)
    assert job.wait() == 1
    assert "hvdrun: rank 1 on localhost ended with exit code 1; the other ranks were ended. The last lines" in job.log
    assert job.log.endswith("    ValueError: bad batch\n")
    assert job.workers == ["worker-0", "worker-1", "worker-2"]
    assert not job.changes


def test_an_exception_that_no_traceback_shows_ends_the_job_too(start):
    job = start(2, *COOLDOWN)
    job.want("crash", 1)
    assert job.wait() == 1
    said = "hvdrun: rank 1 on localhost raised ValueError: bad batch, and ended with exit code 1; the other ranks were"
    assert said in job.log
    assert job.log.endswith("    crashed\n")
    assert not job.changes


def test_newcomers_that_fail_or_differ_are_failures_of_their_host(start, tmp_path):
    offer(tmp_path, 1)
    job = start(1, *offered(tmp_path))
    job.want("fail", 1)
    job.want("differ", 2)
    offer(tmp_path, 3)
    failed = "hvdrun: worker-{} on host localhost failed before it could train; the others go on: it "
    job.until(lambda: all(failed.format(number) in job.log for number in (1, 2)), "both newcomers failed")
    assert job.end() == 0, job.log
    assert_agreement(job, 0)
    assert failed.format(1) + "ended with exit code 1. The last lines of its standard error:\n" in job.log
    assert failed.format(2) + "has a state with other entries, shapes or types than the ranks" in job.log
    assert "    ImportError: no such module\n" in job.log


def test_the_reset_limit(start):
    job = start(3, "--reset-limit", 1)
    job.kill(2)
    job.until_training(0, 1)
    job.kill(1)
    assert job.wait() == 137
    assert "the number of resets exceeded its limit of 1 (2 failures, 0 resizes); raise the limit" in job.log


def test_too_few_workers_for_too_long(start, tmp_path):
    job = start(3, "--min-np", 2, "--elastic-timeout", 2, "--host-discovery-script", "echo localhost:1", trains=False)
    assert job.wait() == 1
    assert "hvdrun: the job has 0 of at least 2 workers (hosts: localhost: 1 slot) within the elastic" in job.log
    assert job.workers == []


def test_no_host_at_all_for_too_long(start):
    job = start(1, "--elastic-timeout", 1, "--host-discovery-script", "echo Error:404", trains=False)
    assert job.wait() == 1
    assert "the job has 0 of at least 1 workers (hosts: none was found) within the elastic timeout of 1 s; " in job.log
    assert ". Host Error cannot be used: give --remote-shell to start ranks on other hosts\n" in job.log


def test_a_stopped_rank_is_replaced(start):
    job = start(3, *COOLDOWN, variables=SHORT)
    job.kill(1, number=signal.SIGSTOP)
    job.until_training(0, 2, 3)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2, 3)


def test_a_rank_that_stops_is_replaced_even_if_the_next_world_was_planned_with_it(start, tmp_path):
    job = start(3, *COOLDOWN, variables=SHORT)
    job.want("hold", 3)
    job.kill(2)
    job.until(lambda: job.notes(3), "worker 3 is up")
    job.kill(0, number=signal.SIGSTOP)
    (tmp_path / "hold").unlink()  # it is ready before anybody misses rank 0
    job.until_training(1, 3, 4)
    assert job.end() == 0, job.log
    assert_agreement(job, 1, 3, 4)


def test_a_rank_killed_before_init_returns(start):
    (job := start(3, *COOLDOWN, trains=False)).want("hold", 1)
    job.until(lambda: job.notes(1), "worker 1 is up")
    job.kill(1)
    job.until_training(0, 2, 3)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2, 3)


def test_a_killed_driver_leaves_no_worker(start):
    job = start(2)
    workers = [psutil.Process(job.pid(worker)) for worker in (0, 1)]
    job.process.kill()
    _, alive = psutil.wait_procs(workers, PATIENCE_SECONDS)
    assert not alive


def test_a_newcomer_comes_into_the_second_function_of_a_script(start):
    job = start(2, *COOLDOWN, arguments=["twice"])
    assert "warm-up" in job.notes(0)
    job.kill(1)
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)
    assert "warm-up" not in job.notes(2)
    assert "worker-2 joins the job in call 2 of elastic functions" in job.log
    assert len(job.changes) == 2


def test_a_newcomer_that_comes_between_two_functions_of_a_script_waits_for_the_second_one(start, tmp_path):
    (tmp_path / "pause").touch()
    job = start(2, *COOLDOWN, arguments=["twice"], trains=False)
    for worker in (0, 1):
        job.until(lambda worker=worker: "between" in job.notes(worker), "the first function returned")
    job.kill(1)
    waits = "worker-2 waits for the next call of an elastic function: the ranks have returned from call 1"
    job.until(lambda: waits in job.log, "the newcomer waits")
    (tmp_path / "pause").unlink()
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)
    assert "warm-up" not in job.notes(2)


def test_process_sets_exist_again(start):
    """Also in a newcomer, and where the set has all ranks for a while."""
    job = start(3, *COOLDOWN, arguments=["sets"])
    job.kill(0)
    job.until_training(1, 2, 3)
    assert job.end() == 0, job.log
    for worker in (1, 2, 3):
        own_rank = job.results()[f"worker-{worker}"][2]
        assert ("set [0, 1] of 3" in job.notes(worker)) == (own_rank < 2)
    assert "set [0, 1] of 2" in job.notes(1)


def test_the_results_of_run_are_those_of_the_last_world(tmp_path):
    def function(path):
        from hvd_cluster.core import basics
        from hvd_cluster.elastic.loop import run as elastic
        from hvd_cluster.elastic.state import ObjectState
        from hvd_cluster.ops.objects import allgather_object

        basics.init()

        @elastic
        def train(state):
            while state.step < 20:
                if state.step == 10 and os.environ["HOROVOD_WORKER_ID"] == "worker-1":
                    os.kill(os.getpid(), signal.SIGKILL)
                allgather_object(state.step, "step")
                state.step += 1
                state.commit()
            return basics.rank(), basics.size(), state.step

        return train(ObjectState(step=0))

    assert run(function, (tmp_path,), num_proc=3, min_num_proc=1) == [(0, 2, 20), (1, 2, 20)]
