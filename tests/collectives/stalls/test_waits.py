"""The text about a rank that others wait for, and the questions of rank 0 behind it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.controller.messages import decode, encode
from collectives.controller.waits import (
    Activity,
    CallInFlight,
    Frame,
    ProcessState,
    RankStatus,
    Waiting,
    activity,
    describe,
    describe_silent,
)
from collectives.stalls.status import ASKED_RANKS, StatusTable

LOSS, OTHER = CallInFlight("loss", 0, 12.4), CallInFlight("mean", 3, 7.0)
FRAMES = (Frame("train.py", 50, 50, "<module>", "load()"), Frame("train.py", 10, 12, "load", "total += 1"))


@pytest.mark.parametrize(
    ("is_alive", "is_inside", "waits", "busy", "expected"),
    [
        (True, True, [OTHER], 0.0, Activity.WAITS),
        (True, False, [OTHER], 0.0, Activity.BLOCKED),  # it was polled, and nobody waits for it
        (True, False, [], 0.5, Activity.COMPUTES),
        (True, True, [], 0.0, Activity.BLOCKED),
        (True, False, [], 0.05, Activity.BLOCKED),
        (False, True, [OTHER], 1.0, Activity.ENDED),
    ],
)
def test_the_activity_follows_from_the_thread_and_its_calls(is_alive, is_inside, waits, busy, expected):
    assert activity(is_alive, is_inside, waits, busy) is expected


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            RankStatus(2, Activity.COMPUTES, busy=0.97, last=LOSS, frames=FRAMES),
            "rank 2 computes, perhaps in an endless loop: its main thread uses a processor for 97% of the time that "
            "it gets. Its last collective is 'loss', submitted 12 s ago\n"
            "    train.py:50 in <module>: load()\n"
            "    train.py:10-12 in load: total += 1",
        ),
        (
            RankStatus(2, Activity.BLOCKED, waits=(LOSS,)),
            "rank 2 needs other ranks itself, for 'loss', submitted 12 s ago; its main thread is in another call, such "
            "as a step of a graph in fit(), or a sleep",
        ),
        (
            RankStatus(2, Activity.BLOCKED, "trainer"),
            "rank 2 is blocked in a call that is not a collective, such as a sleep: its thread 'trainer' uses no "
            "processor. It has submitted nothing yet",
        ),
        (
            RankStatus(1, Activity.WAITS, last=OTHER, waits=(OTHER, LOSS)),
            "rank 1 waits itself, for 'mean' on process set 3, submitted 7 s ago and 'loss', submitted 12 s ago",
        ),
        (
            RankStatus(1, Activity.ENDED, last=LOSS),
            "rank 1 will submit nothing more: its main thread has ended, but another thread keeps its process. Its "
            "last collective is 'loss', submitted 12 s ago",
        ),
    ],
)
def test_each_activity_has_a_text_of_its_own(found, text):
    assert describe(found) == text


def test_long_names_and_lines_are_cut():
    found = RankStatus(
        1, Activity.BLOCKED, last=CallInFlight("n" * 999, 0, 1.0), frames=(Frame("f", 1, 1, "g", "s" * 999),)
    )
    assert len(describe(found)) < 500


@pytest.mark.parametrize(
    ("letter", "text"),
    [
        ("T", "Process 71 is stopped (state T): by SIGSTOP"),
        ("t", "Process 71 is stopped by a debugger"),
        ("D", "Process 71 waits for a disk or a network file system"),
        ("R", "Process 71 runs (state R), but one call of a library may hold its Python interpreter"),
        ("S", "Process 71 sleeps (state S), in a call of a library"),
        ("Z", "Process 71 has ended"),
        ("X", "Process 71 is in state X"),
    ],
)
def test_the_state_of_a_process_explains_its_silence(letter, text):
    assert describe_silent((1,), {1: ProcessState(71, letter)}).startswith(text)


def test_a_process_of_another_host_may_be_stopped_or_busy():
    unknown = "The process is stopped, or one call holds its Python interpreter; look at it"
    assert describe_silent((1,), {}) == unknown
    both = describe_silent((1, 2), {2: ProcessState(71, "T")})
    assert both.startswith("Process 71 is stopped")
    assert both.endswith(f"; {unknown}")


texts = st.text(max_size=9)
calls = st.builds(CallInFlight, texts, st.integers(0, 9), st.floats(0, 1e6))
frames = st.builds(Frame, texts, st.integers(0, 999), st.integers(0, 999), texts, texts)


def tuples(values):
    return st.lists(values, max_size=3).map(tuple)


@settings(max_examples=30)
@given(
    st.builds(
        RankStatus,
        st.integers(0, 999),
        st.sampled_from(Activity),
        texts,
        st.floats(0, 1),
        st.none() | calls,
        tuples(calls),
        tuples(frames),
    )
)
def test_what_is_sent_is_what_arrives(found):
    assert decode(encode(found)) == found


# The questions.


def asked(statuses, ranks, since):
    statuses.ask(ranks, since)
    return [*statuses.take_questions()]


def test_each_rank_is_asked_once_and_again_for_the_next_report():
    statuses = StatusTable()
    assert asked(statuses, (1, 2), 10.0) == [1, 2]
    assert asked(statuses, (1, 2), 10.0) == []
    statuses.hear(RankStatus(1, Activity.BLOCKED), 10.2)
    assert not statuses.is_complete((1, 2), 10.0)
    assert asked(statuses, (1, 2), 10.0) == []
    statuses.hear(RankStatus(2, Activity.BLOCKED), 10.3)
    assert statuses.is_complete((1, 2), 10.0)
    assert asked(statuses, (1, 2), 20.0) == [1, 2], "an answer of the last report is too old for this one"


def test_a_silent_rank_still_has_the_first_question():
    statuses = StatusTable()
    assert asked(statuses, (1,), 10.0) == [1]
    assert statuses.describe((1,), 10.0, {1: ProcessState(71, "T")})[0].startswith(
        "rank 1 does not answer. Process 71 is stopped"
    )
    assert asked(statuses, (1,), 20.0) == []
    statuses.hear(RankStatus(1, Activity.BLOCKED), 20.1)
    assert statuses.describe((1,), 20.0, {})[0].startswith("rank 1 is blocked")


def test_a_rank_behind_a_silent_one_is_not_called_stopped():
    statuses = StatusTable({3: 2, 4: 2})
    asked(statuses, (2, 3, 4), 10.0)
    texts = statuses.describe((2, 3, 4), 10.0, {})
    assert [text.split(". ")[0] for text in texts] == [
        "rank 2 does not answer",
        "rank 3 cannot answer without rank 2, which passes its messages on",
        "rank 4 cannot answer without rank 2, which passes its messages on",
    ]
    statuses.hear(RankStatus(2, Activity.BLOCKED), 10.1)
    assert statuses.describe((2, 3), 10.0, {})[1].startswith("rank 3 does not answer. ")


def test_of_many_ranks_a_few_are_asked():
    statuses, many = StatusTable(), tuple(range(100))
    first = asked(statuses, many, 1.0)
    assert first == list(range(ASKED_RANKS))
    for rank in first:
        statuses.hear(RankStatus(rank, Activity.BLOCKED), 2.0)
    assert statuses.is_complete(many, 1.0)
    assert len(statuses.describe(many, 1.0, {})) == ASKED_RANKS


def test_a_rank_that_waits_for_the_tensor_itself_is_not_missing():
    """Ranks 2 to 4 are named because the rank that speaks for them is late; rank 3 waits for another tensor."""
    statuses, loss, mean = StatusTable(), (0, "loss"), (3, "mean")
    pending = {loss: Waiting(5.0, (2, 3, 4), (0, 1)), mean: Waiting(6.0, (2,), (0,))}
    statuses.hear(RankStatus(2, Activity.WAITS, waits=(LOSS,)), 9.0)
    assert statuses.cleared(pending, 10.0) == pending, "an answer of the last report is too old for this one"
    statuses.hear(RankStatus(2, Activity.WAITS, waits=(LOSS,)), 10.1)
    statuses.hear(RankStatus(3, Activity.WAITS, waits=(OTHER,)), 10.2)
    statuses.hear(RankStatus(4, Activity.BLOCKED, waits=(LOSS,)), 10.3)
    assert statuses.cleared(pending, 10.0) == {loss: Waiting(5.0, (3, 4), (0, 1, 2)), mean: pending[mean]}
    for rank in (3, 4):
        statuses.hear(RankStatus(rank, Activity.WAITS, waits=(LOSS,)), 10.4)
    assert statuses.cleared(pending, 10.0) == pending, "somebody is late, and these are the only ranks that are known"
