"""Reports about tensors that wait: their text, how often they come, and when the job must end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.controller.waits import Waiting, stalled_join
from collectives.stalls.inspector import StallInspector, StallReport

NOTHING = StallReport()
ONE = {(0, "allreduce.a"): Waiting(100.0, missing=(1,), submitted=(0, 2))}


def said(pending, now, warn=60.0, shutdown=0.0):
    return StallInspector(warn, shutdown).inspect(pending, now)


def test_the_report_names_tensor_time_ranks_and_remedy():
    assert said(ONE, 175.4) == StallReport(
        "a tensor has waited, for up to 75 s, for ranks that did not submit it:\n"
        "  missing rank 1: 'allreduce.a' (75 s, submitted by ranks 0, 2)\n"
        "  A slow rank will still come. Otherwise the ranks run different code: check that each of them submits the "
        "same names, also under conditions and when it has less data, and look at the output of the missing ranks",
        keys=((0, "allreduce.a"),),
    )


@pytest.mark.parametrize(("now", "speaks"), [(100.0, False), (159.9, False), (160.0, True), (1000.0, True)])
def test_nothing_is_said_before_the_time(now, speaks):
    assert (said(ONE, now) != NOTHING) is speaks
    assert said({}, now) == NOTHING


def test_each_tensor_is_reported_once_in_an_interval():
    inspector = StallInspector(60.0)
    two = {**ONE, (0, "b"): Waiting(130.0, (2,), (0, 1))}
    told = {now: inspector.inspect(two, float(now)).text or "" for now in (160, 170, 190, 200, 219, 220, 250, 251)}
    assert {now for now, text in told.items() if "'allreduce.a'" in text} == {160, 220}
    assert {now for now, text in told.items() if "'b'" in text} == {190, 250}


def test_the_tensors_of_one_step_are_one_report():
    inspector = StallInspector(60.0)
    step = {(0, f"t{number}"): Waiting(100.0 + number, (1,), (0,)) for number in range(5)}
    assert inspector.inspect({**step, (0, "later"): Waiting(107.0, (1,), (0,))}, 160.0).text.startswith("5 tensors")
    assert inspector.deadline(step) == 220.0


def test_a_tensor_that_comes_again_waits_anew():
    inspector = StallInspector(60.0)
    assert inspector.inspect(ONE, 160.0).text
    again = {(0, "allreduce.a"): Waiting(161.0, (1,), (0, 2))}
    assert inspector.deadline(again) == 221.0
    assert inspector.inspect(again, 220.9) == NOTHING
    assert inspector.inspect(again, 221.0).text
    assert inspector.inspect({}, 222.0) == NOTHING
    assert inspector.inspect(ONE, 223.0).text, "it was forgotten when it did not wait any more"


def test_ranks_that_lack_the_same_are_told_together_and_names_are_cut():
    tensors = {(0, f"t{number}"): Waiting(float(number), (1, 3), (0, 2)) for number in range(8)}
    tensors[0, "other"] = Waiting(50.0, (2,), (0, 1, 3))
    lines = said(tensors, 100.0, warn=10.0).text.split("\n  ")
    assert lines[0] == "9 tensors have waited, for up to 100 s, for ranks that did not submit them:"
    shown = ", ".join(f"'t{number}' ({100 - number} s, submitted by ranks 0, 2)" for number in range(6))
    assert lines[1] == f"missing ranks 1, 3: {shown} and 2 more"
    assert lines[2] == "missing rank 2: 'other' (50 s, submitted by ranks 0, 1, 3)"


def test_many_ranks_and_long_names_are_cut():
    text = said({(0, "n" * 5000): Waiting(0.0, tuple(range(1, 2000)), (0,))}, 100.0).text
    assert "missing ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, ...: 'nnn" in text
    assert len(text) < 1000


def test_a_process_set_is_named():
    assert "'a' on process set 7 (60 s, submitted by rank 4)" in said({(7, "a"): Waiting(0.0, (5,), (4,))}, 60.0).text


JOIN = Waiting(100.0, missing=(1, 3), submitted=(0, 2))


@pytest.mark.parametrize(
    ("heard", "waiting", "expected"),
    [
        ({}, (), (100.0, (1, 3))),
        ({1: 50.0, 3: 99.0}, (), (100.0, (1, 3))),  # both came before the join
        ({1: 130.0, 3: 130.4}, (), (130.0, (1, 3))),
        ({1: 130.0, 3: 170.0}, (), (130.0, (1,))),
        ({3: 170.0}, (), (100.0, (1,))),
        ({0: 199.0, 2: 199.0}, (), (100.0, (1, 3))),  # messages of ranks that have joined
        ({}, (1,), (100.0, (3,))),
        ({3: 170.0}, (1,), (170.0, (3,))),
    ],
)
def test_a_join_waits_from_the_last_message_of_a_missing_rank_that_does_not_wait_itself(heard, waiting, expected):
    since, missing = expected
    assert stalled_join(JOIN, heard, waiting) == Waiting(since, missing, (0, 2), silent=True)


def test_a_join_whose_missing_ranks_wait_themselves_is_no_stall():
    assert stalled_join(JOIN, {}, (1, 3)) is None


def test_the_report_about_a_join():
    join = stalled_join(JOIN, {3: 170.0}, ())
    assert "missing rank 1: 'join' (60 s, submitted by ranks 0, 2, and nothing else by the missing ranks)" in (
        said({(0, "join"): join}, 160.0).text
    )


def mixed_up(pending):
    return [line for line in said(pending, 100.0).text.split("\n  ") if "call different process sets" in line]


def test_a_name_on_two_process_sets():
    pending = {(0, "a"): Waiting(0.0, (1,), (0,)), (1, "a"): Waiting(99.0, (2,), (1,))}
    assert mixed_up(pending) == [
        "'a' was submitted on process set 0 by rank 0 and on process set 1 by rank 1: these ranks call different "
        "process sets"
    ]


@pytest.mark.parametrize(
    "other",
    [
        ((1, "b"), Waiting(0.0, (2,), (1,))),  # another name
        ((1, "a"), Waiting(0.0, (3,), (2,))),  # other ranks
        ((0, "b"), Waiting(0.0, (2,), (1,))),  # the same set
    ],
)
def test_no_process_sets_that_are_mixed_up(other):
    assert not mixed_up({(0, "a"): Waiting(0.0, (1,), (0,)), other[0]: other[1]})


def test_what_waits_too_long_ends_the_job():
    inspector = StallInspector(60.0, 90.0)
    assert not inspector.inspect(ONE, 160.0).fatal
    assert inspector.deadline(ONE) == 190.0
    assert inspector.inspect(ONE, 189.9) == NOTHING
    text, fatal, ranks, keys = inspector.inspect({**ONE, (0, "young"): Waiting(180.0, (1,), (0,))}, 190.0)
    assert ranks == (1,)
    assert fatal
    assert keys == ((0, "allreduce.a"),)
    assert "missing rank 1: 'allreduce.a' (90 s, submitted by ranks 0, 2)" in text
    assert "longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS (90): the job ends" in text
    assert "young" not in text


def test_the_deadline_is_that_of_the_first():
    inspector = StallInspector(60.0, 100.0)
    assert inspector.deadline({}) is None
    two = {**ONE, (0, "b"): Waiting(130.0, (2,), (0, 1))}
    assert inspector.deadline(two) == 160.0
    inspector.inspect(two, 160.0)
    assert inspector.deadline(two) == 190.0
    inspector.inspect(two, 190.0)
    assert inspector.deadline(two) == 200.0, "the end of the first"


TENSORS = st.dictionaries(
    st.tuples(st.integers(0, 2), st.sampled_from("abcd")),
    st.builds(Waiting, st.floats(0, 300), st.just((1,)), st.just((0,))),
)


@given(TENSORS, st.floats(1, 100))
def test_looking_at_the_deadlines_is_looking_always(pending, warn):
    """Between two deadlines nothing is ever said, and at each something is."""
    lazy, eager = StallInspector(warn), StallInspector(warn)
    now = lazy.deadline(pending)
    for _ in range(12 if pending else 0):
        before = now - 1e-6
        assert eager.inspect(pending, before) == NOTHING or before < min(w.since for w in pending.values())
        report = lazy.inspect(pending, now)
        assert report.text
        assert report == eager.inspect(pending, now)
        following = lazy.deadline(pending)
        assert following > now
        now = following


@given(TENSORS.filter(lambda tensors: len(tensors) <= 6), st.lists(st.floats(0, 2000), max_size=30))
def test_every_tensor_is_reported_once_in_an_interval(pending, times):
    inspector, last = StallInspector(50.0), {}
    for now in sorted(times):
        text = inspector.inspect(pending, now).text or ""
        for (process_set, name), waiting in pending.items():
            where = f" on process set {process_set}" if process_set else ""
            reported = f"'{name}'{where} (" in text
            key = (process_set, name)
            before = last.get(key, waiting.since)
            assert not (reported and now < before + 44.9)
            assert reported or now < before + 50.0
            if reported:
                last[key] = now
