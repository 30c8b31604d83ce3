"""Workers that end the job, and those that cannot; test_every_end.py tries all orders of a few events."""

import pytest
from membership_job import Job, failed, ready, running, workers, world

from executors.membership import (
    End,
    HostDraining,
    HostFound,
    HostLost,
    StopWorker,
    WorkerBehind,
    WorkerDone,
    WorkerDraining,
    WorkerFailed,
    WorkerLeaves,
    WorkerRaised,
    WorldFormed,
)


def test_an_exception_of_the_user_ends_the_job():
    job = running()
    assert job.on(WorkerRaised("worker-1", "ValueError: boom")) == [
        End("worker-1 on host a raised an exception: ValueError: boom")
    ]
    assert job.on(failed(0)) == []


def test_a_worker_that_is_done_ends_growth_but_not_the_job_of_the_others():
    job = running(2, 2, 4)
    job.on(HostFound("b", 2), ready(2))
    assert job.on(WorkerDone("worker-0")) == [StopWorker("worker-2"), StopWorker("worker-3"), world(1, 1)]
    assert job.on(HostFound("c", 2)) == []
    assert job.on(WorkerDone("worker-1")) == [End()]


def test_events_of_strangers_are_ignored():
    job = running(2, 1)
    assert job.on(failed(7), ready(7), WorkerDone("worker-7"), WorkerRaised("worker-7", "")) == []
    assert job.on(HostDraining("x"), HostLost("x", "")) == []
    assert job.counts == (0, 0, 0)


def done(*numbers):
    return [WorkerDone(worker) for worker in workers(*numbers)]


def unexplained(number):
    return WorkerFailed(f"worker-{number}", "ended", is_explained=False)


def unrepaired(*numbers):
    return End(f"no worker is left that could go on without {', '.join(workers(*numbers))}", workers(*numbers))


@pytest.mark.parametrize("loss", [failed(1), HostLost("b", "gone")], ids=["worker", "host"])
@pytest.mark.parametrize("has_formed", [True, False])
def test_the_loss_of_the_last_worker_is_that_of_the_job(loss, has_formed):
    job = running(2, 1, hosts={"a": 1, "b": 1})
    assert job.on(*done(0)) == [world(1, 1)]
    assert not has_formed or job.form() == []
    assert job.on(loss) == [unrepaired(1)]


def test_others_that_were_done_without_another_world_did_not_repair_a_loss():
    """Their function had returned before, so they did not do the work of the lost worker again."""
    job = running(3, 1)
    assert job.on(failed(2)) == [world(1, 0, 1)]
    assert job.on(*done(0, 1)) == [world(2, 1), unrepaired(2)]


def test_one_that_goes_on_in_another_world_and_is_done_repairs_a_loss():
    job = running(3, 1)
    assert job.on(failed(2)) == [world(1, 0, 1)]
    assert job.form() == []
    assert job.on(*done(0, 1)) == [world(2, 1), End()]


def test_the_report_of_that_world_may_come_after_the_first_of_it_was_done():
    job = running(3, 1)
    job.on(failed(2), *done(1))
    assert job.membership.published.round == 2
    job.form()
    assert job.on(*done(0)) == [End()]


def test_the_last_of_several_losses_is_the_reason():
    """Worker 0 took over from worker 2; nobody did from worker 0."""
    job = running(3, 1)
    job.on(*done(1))
    job.form()
    job.on(failed(2))
    job.form()
    assert job.on(failed(0)) == [unrepaired(0)]


def test_a_repaired_loss_is_not_the_reason():
    job = running(3, 1)
    job.on(failed(2))
    job.form()
    assert job.on(*done(0), failed(1)) == [world(2, 1), unrepaired(1)]


def test_without_an_elastic_function_no_loss_is_repaired():
    job = Job(2, 1)
    job.on(HostFound("a", 2))
    assert job.on(failed(0)) == [world(1, 1)]
    assert job.on(*done(1)) == [unrepaired(0)]


@pytest.mark.parametrize("has_begun", [True, False])
def test_one_that_could_not_be_started_has_left_no_work_undone(has_begun):
    job = Job(2, 1)
    job.on(HostFound("a", 2))
    job.on(WorkerFailed("worker-1", "could not be started", has_begun=has_begun))
    assert job.on(*done(0)) == [unrepaired(1) if has_begun else End()]


def test_a_newcomer_that_never_trained_is_no_loss():
    job = running(2, 1, 3)
    job.on(HostFound("b", 1), ready(2))
    assert job.membership.published.workers == workers(0, 1, 2)
    assert job.on(*done(0), failed(2), *done(1))[-1] == End()


def test_a_newcomer_has_trained_though_the_report_of_its_world_comes_late():
    job = running(2, 1, 3)
    job.on(HostFound("b", 1), ready(2))
    assert job.on(failed(2)) == [world(2, 0, 1)]
    assert job.on(WorldFormed(1)) == []
    assert job.on(*done(0, 1))[-1] == unrepaired(2)


def test_one_that_is_left_behind_is_no_loss():
    job = running(2, 1)
    assert job.on(WorkerBehind("worker-1"), *done(0))[-1] == End()


@pytest.mark.parametrize("has_left", [True, False])
def test_one_that_drains_and_has_not_left_is_a_loss(has_left):
    job = running(2, 1)
    assert job.on(WorkerDraining("worker-1")) == [world(1, 0, planned=True)]
    if has_left:
        assert job.on(WorkerLeaves("worker-1")) == []
    assert job.on(failed(1)) == [world(2, 0)]
    assert job.on(*done(0)) == [End() if has_left else unrepaired(1)]
    assert job.counts == (0, 0, 1)


def test_the_last_worker_goes_on_though_it_drains():
    """The others are done, so that nobody can take over."""
    job = running(2, 1, hosts={"a": 1, "b": 1})
    assert job.on(HostDraining("b", until=200.0)) == [world(1, 0, planned=True)]
    assert job.on(*done(0)) == [world(2, 1)]
    assert job.on(HostLost("b", "preempted")) == [unrepaired(1)]


def test_a_loss_that_others_have_noticed_may_turn_out_to_be_the_end_of_one_that_was_done():
    job = running(2, 1)
    assert job.on(unexplained(1), *done(0)) == [world(1, 0)]
    assert job.on(*done(1)) == [End()]


@pytest.mark.parametrize("reason", [failed(1), HostLost("a", "gone")], ids=["worker", "host"])
def test_the_job_waits_for_the_reason_of_such_a_loss(reason):
    job = running(2, 1)
    assert job.on(unexplained(1), *done(0)) == [world(1, 0)]
    assert job.after(1000.0) == []
    assert job.on(reason) == [unrepaired(1)]


def test_it_also_waits_before_it_gives_up():
    job = running(2, 1)
    assert job.on(unexplained(1), failed(0)) == [world(1, 0)]
    assert job.on(*done(1)) == [unrepaired(0)]
