"""The failures of the workers of a job."""

from executors.failures import Failure, FailureKind
from executors.membership.deaths import Failures

LOST = Failure(FailureKind.LOST_PEER, "lost a peer")
KILLED = Failure(FailureKind.SIGNAL, "was killed")
ENDED = Failure(FailureKind.EXIT, "ended with exit code 1", exit_code=1)


def failures(*failed):
    found = Failures()
    for number, failure in enumerate(failed):
        found.add(f"worker-{number}", number, failure)
    return found


def test_the_cause_is_the_likeliest_the_first_among_several():
    found = failures(LOST, ENDED, KILLED, KILLED)
    assert (found.cause.worker, found.cause.rank) == ("worker-2", 2)


def test_a_consequence_is_no_cause():
    assert not failures().has_cause
    assert not failures(LOST).has_cause
    assert failures(LOST, ENDED).has_cause


def test_the_rank_that_raised_is_named_by_those_that_it_ended():
    left = Failure(FailureKind.SHUT_DOWN, "left", 1, ("Horovod has been shut down by rank 2: it raised KeyError: 1",))
    assert failures(LOST, left).raised_elsewhere == (2, "raised KeyError: 1")
    assert failures(LOST).raised_elsewhere is None
    assert failures(left, KILLED).raised_elsewhere is None
    assert failures(left, LOST, LOST).raised_elsewhere is None  # rank 2 has ended, too


def test_a_likelier_report_of_the_same_end_counts():
    found = failures(LOST, ENDED)
    found.improve("worker-0", KILLED)
    assert (found.of("worker-0"), found.cause.worker) == (KILLED, "worker-0")
    found.improve("worker-0", LOST)
    assert found.of("worker-0") == KILLED
    assert found.of("worker-9") is None


def test_of_reports_that_are_as_likely_the_first_counts():
    found = failures(KILLED, ENDED)
    found.improve("worker-0", Failure(FailureKind.SIGNAL, "was killed again"))
    assert found.of("worker-0") == KILLED


def test_the_last_one_is_that_before_the_end_as_it_is_known_later():
    found = failures(KILLED, ENDED)
    assert found.last is None
    found.end()
    found.add("worker-2", None, LOST)
    found.explain("worker-1", KILLED)
    assert (found.last.worker, found.last.failure) == ("worker-1", KILLED)


def test_an_end_that_may_be_that_of_an_exception():
    found = failures()
    found.note_exception("worker-0", "ValueError: why")
    assert found.has_exception("worker-0")
    assert not found.has_exception("worker-1")
    assert found.with_exception("worker-1", ENDED) == ENDED
    raised = found.with_exception("worker-0", ENDED)
    assert (raised.kind, raised.text) == (FailureKind.EXCEPTION, "raised ValueError: why, and ended with exit code 1")
    killed = found.with_exception("worker-0", KILLED)
    assert (killed.kind, killed.text) == (FailureKind.SIGNAL, "was killed; before, it raised ValueError: why")
    assert found.with_exception("worker-0", LOST) == LOST
