"""What follows from the end of a worker: each rule alone, without a driver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.api import ExecutorError, WorkerError
from executors.failures import Failure, FailureKind
from executors.membership import End, HostFound, Limits, Membership, WorkerFailed, WorkerRaised, WorldFormed
from executors.membership.deaths import CUT_OFF, ENDED, AccusationVerdict, Deaths, Losses

KILLED = Failure(FailureKind.SIGNAL, "was killed by signal 9", -9)
RAISED = Failure(FailureKind.EXCEPTION, "raised", error=KeyError("x"))
MEMBERS = ("worker-0", "worker-1", "worker-2")
HOSTS = dict.fromkeys(MEMBERS, "a")
SOME = st.sets(st.sampled_from(MEMBERS), min_size=1)


def deaths(least=1, **limits):
    bounds = Limits(3, least, 3, **limits)
    membership = Membership(bounds, lambda: 0.0)
    membership.handle(HostFound("a", 3), 0.0)
    membership.handle(WorldFormed(0), 1.0)
    return Deaths(bounds, membership)


class TestAccusations:
    def test_the_accused_ends_and_not_the_accuser(self):
        assert deaths().judge("worker-0", ["worker-1"], MEMBERS) == AccusationVerdict(("worker-1",))

    def test_a_newcomer_that_accuses_all_workers_with_the_state_ends_itself(self):
        found = deaths().judge("worker-7", ["worker-1", *MEMBERS], MEMBERS)
        assert found == AccusationVerdict(("worker-7",), CUT_OFF)
        assert deaths().judge("worker-7", MEMBERS[:2], MEMBERS) == AccusationVerdict(MEMBERS[:2])

    def test_who_accuses_itself_accuses_nobody(self):
        assert deaths().judge("worker-0", ["worker-0"], MEMBERS) == AccusationVerdict(has_failed=True)

    def test_a_worker_that_the_present_world_is_without_is_not_ended(self):
        assert deaths().judge("worker-0", ["worker-2"], MEMBERS[:2]) == AccusationVerdict(has_failed=True)

    def test_an_accuser_of_a_world_of_the_past_ends_only_if_it_is_no_member(self):
        found = deaths()
        assert found.judge("worker-2", None, MEMBERS) == AccusationVerdict()
        found.published(MEMBERS, MEMBERS[:2])
        assert found.judge("worker-2", None, MEMBERS[:2]) == AccusationVerdict(dismissed=("worker-2",))
        assert found.judge("worker-1", None, MEMBERS[:2]) == AccusationVerdict()


class TestLosses:
    def test_a_world_with_the_lost_worker_that_is_reported_late_repairs_nothing(self):
        losses = Losses()
        losses.add("worker-0", is_explained=True, had_part=False)
        losses.formed(MEMBERS[1:])
        losses.formed(MEMBERS)
        losses.done("worker-1")
        assert losses.unrepaired() == ("worker-0",)
        losses.formed(MEMBERS[1:])
        assert losses.unrepaired() == ()

    @given(
        st.lists(st.tuples(st.sampled_from(["add", "formed", "done"]), st.sets(st.sampled_from(MEMBERS), min_size=1)))
    )
    def test_the_unrepaired_are_those_without_a_done_worker_in_a_later_world(self, events):
        losses, lost, done = Losses(), {}, set()
        for kind, workers in events:
            first = min(workers)
            if kind == "formed":
                losses.formed(workers)
                for worker, later in lost.items():
                    later.clear() if worker in workers else later.update(workers)
            elif kind == "add":
                losses.add(first, is_explained=True, had_part=True)
                lost[first] = set()
            else:
                losses.done(first)
                lost.pop(first, None)
                done.add(first)
        unrepaired = [worker for worker, later in lost.items() if later.isdisjoint(done)]
        expected = [worker for worker in unrepaired if not lost[worker]] or unrepaired
        assert sorted(losses.unrepaired()) == sorted(expected)


class TestNoticedLosses:
    def test_a_job_that_goes_on_in_any_case_does_not_wait_for_the_agents(self):
        assert not deaths().may_end_job(["worker-1"], MEMBERS)

    @pytest.mark.parametrize("limits", [{"least": 3}, {"resets": 5}, {"failures": 5}])
    def test_a_job_that_the_loss_may_end_does(self, limits):
        assert deaths(**limits).may_end_job(["worker-1"], MEMBERS)

    def test_a_job_whose_lost_worker_has_raised_does(self):
        found = deaths()
        found.failures.note_exception("worker-1", "KeyError")
        assert found.may_end_job(["worker-1"], MEMBERS)

    def test_the_agent_explains_later(self):
        found = deaths()
        first = found.failed("worker-1", ENDED, 1)
        assert (first.is_new, first.event) == (True, WorkerFailed("worker-1", "ended", is_explained=False))
        second = found.failed("worker-1", KILLED, 1)
        assert (second.is_explained, second.event) == (True, WorkerFailed("worker-1", KILLED.text))
        assert found.lost == {"worker-1": KILLED.text}
        assert found.failed("worker-1", KILLED, 1).event is None

    def test_the_agent_may_say_that_it_was_done(self):
        found = deaths()
        found.failed("worker-1", ENDED, 1)
        assert found.succeeded("worker-1", "returned", MEMBERS)
        assert (found.lost, found.done, bool(found.failures)) == ({}, {"worker-1": "returned"}, False)


class TestLostAgents:
    def test_a_worker_that_has_returned_is_done(self):
        verdict = deaths().agent_lost("worker-1", "no answer", True, 1)
        assert verdict.is_done

    def test_another_one_is_lost(self):
        found = deaths()
        assert not found.agent_lost("worker-1", "no answer", False, 1).is_done
        assert found.failures.of("worker-1").text == "was lost (no answer)"

    def test_one_that_the_others_have_noticed_is_explained(self):
        found = deaths()
        found.failed("worker-1", ENDED, 1)
        assert found.agent_lost("worker-1", "no answer", False, 1).is_explained
        assert not found.is_unexplained("worker-1")


def test_an_exception_of_a_rank_ends_the_job_and_that_of_a_former_one_does_not():
    found = deaths()
    assert found.failed("worker-1", RAISED, 1).event == WorkerRaised("worker-1", "raised")
    found.former.add("worker-2")
    assert found.failed("worker-2", RAISED, 2).event == WorkerFailed("worker-2", "raised")


def test_ends_mean_nothing_once_the_driver_ends_the_workers():
    found = deaths()
    found.is_ending = True
    assert found.failed("worker-1", KILLED, 1).event is None
    assert not found.failures


def test_the_error_of_a_job_is_that_of_its_cause():
    found = deaths()
    assert found.error(HOSTS) is None
    found.failed("worker-1", RAISED, 1)
    assert found.over(End("worker-1 raised"), HOSTS) == "worker-1 raised"
    assert found.error(HOSTS) is RAISED.error


def test_the_error_of_an_elastic_job_says_why_it_ends_and_names_the_last_worker():
    found = deaths()
    found.failed("worker-0", KILLED, 0)
    found.failed("worker-1", KILLED, 1)
    found.over(End("too few workers"), HOSTS)
    error = found.error(HOSTS)
    assert (type(error), str(error), error.rank, error.exit_code) == (WorkerError, "too few workers", 1, -9)


def test_a_job_without_a_failure_of_a_worker_has_an_error_too():
    found = deaths()
    found.over(End("no hosts"), HOSTS)
    assert (type(found.error(HOSTS)), str(found.error(HOSTS))) == (ExecutorError, "no hosts")
