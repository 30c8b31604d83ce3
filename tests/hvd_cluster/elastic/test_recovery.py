"""Which rank gives its state: every case of small worlds, and a model of ranks that are cut off anywhere in a step."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import InvalidRequestError
from hvd_cluster.elastic.recovery import (
    RowReport,
    StateReport,
    check_versions,
    decide,
    difference,
    have_one_layout,
    need_rows,
    senders_of_rows,
)
from hvd_cluster.ops.rank_copies import CopyId, RowId


def report(rank, commit, exact=True, copy=0, settled=False, gives=True, partial=None):
    return StateReport(rank, commit, exact, copy, partial, settled, gives, "layout", "1.0")


NEWCOMER = report(0, None, exact=False, copy=None)


def numbered(*reports):
    return [replace(each, rank=rank) for rank, each in enumerate(reports)]


def test_in_the_first_world_rank_0_gives_its_state():
    found = decide(numbered(NEWCOMER, NEWCOMER, NEWCOMER))
    assert (found.source, found.commit, found.receivers, found.present) == (0, 0, {1, 2}, True)


def test_a_sync_in_between_shares_the_present_state_of_rank_0():
    found = decide(numbered(report(0, 4, exact=False, settled=True), report(0, 4, settled=True)))
    assert (found.source, found.commit, found.receivers, found.present) == (0, 5, {1}, True)


def test_one_rank_in_doubt_is_enough_to_look_for_the_latest_commit():
    found = decide(numbered(report(0, 4, exact=False, settled=True), report(0, 4)))
    assert (found.source, found.commit, found.receivers, found.present) == (1, 4, {0}, False)


def test_survivors_of_one_commit_need_nothing():
    found = decide(numbered(report(0, 7), report(0, 7), report(0, 7)))
    assert (found.source, found.commit, found.receivers, found.lost) == (0, 7, set(), 0)


def test_a_rank_that_is_ahead_gives_its_state_to_those_behind():
    found = decide(numbered(report(0, 7), report(0, 8), report(0, 8)))
    assert (found.source, found.commit, found.receivers, found.lost) == (1, 8, {0}, 0)


def test_a_rank_that_was_cut_off_after_its_step_takes_the_state_of_one_that_was_not():
    found = decide(numbered(report(0, 7, exact=False, copy=3), report(0, 7), NEWCOMER))
    assert (found.source, found.commit, found.receivers, found.returning) == (1, 7, {0, 2}, set())


def test_copies_count_where_all_are_touched():
    touched = report(0, 9, exact=False, copy=5)
    found = decide(numbered(touched, replace(touched, copy=6), replace(touched, copy=6), NEWCOMER))
    assert (found.source, found.commit, found.receivers, found.returning, found.lost) == (1, 6, {0, 3}, {1, 2}, 3)


def test_a_copy_of_the_last_commit_is_as_good_as_an_untouched_state():
    found = decide(numbered(report(0, 9, exact=False, copy=9), report(0, 9), report(0, 8)))
    assert (found.source, found.commit, found.receivers, found.returning) == (1, 9, {2}, {0})


def test_only_ranks_that_can_send_are_a_source():
    found = decide(numbered(report(0, 7), report(0, 8, gives=False)))
    assert (found.source, found.commit, found.receivers) == (0, 7, {1})
    with pytest.raises(InvalidRequestError, match="no rank can send a state"):
        decide(numbered(NEWCOMER, report(0, 8, gives=False)))


def test_ranks_that_have_parts_of_a_copy_only_are_no_source():
    partial = report(0, 9, exact=False, copy=None, partial=9)
    found = decide(numbered(partial, replace(partial, partial=None, copy=8)))
    assert (found.source, found.commit, found.receivers, found.lost) == (1, 8, {0}, 1)
    text = "the state of commit 9 is lost: ranks 0, 1 of 3 have parts of it, and all hosts with a copy"
    with pytest.raises(InvalidRequestError, match=text):
        decide(numbered(partial, partial, NEWCOMER))
    assert need_rows([partial, NEWCOMER])
    assert not need_rows([replace(partial, settled=True)])
    assert not need_rows([report(0, 4), NEWCOMER])


FIRST, SECOND = CopyId(7, 1, 2), CopyId(7, 2, 2)


def rows(commit, copy, *held):
    """Of a rank with a partial copy, if ``copy`` is not None; ``held`` are copies with positions."""
    copies = {} if copy is None else {"optimizer": copy}
    return RowReport(commit, copies, {"optimizer": frozenset(RowId(*each) for each in held)})


def test_the_latest_copy_whose_rows_are_all_there_counts():
    told = [
        rows(4, FIRST, (FIRST, 0), (SECOND, 0)),
        rows(5, SECOND, (FIRST, 1), (SECOND, 0)),
        rows(0, None, (SECOND, 1)),
    ]
    assert senders_of_rows(told) == (5, {("optimizer", RowId(SECOND, 0)): 0, ("optimizer", RowId(SECOND, 1)): 2})
    assert senders_of_rows(told[:2]) == (4, {("optimizer", RowId(FIRST, 0)): 0, ("optimizer", RowId(FIRST, 1)): 1})
    assert senders_of_rows(told[:1]) is None
    assert senders_of_rows([told[2]]) is None


def test_all_small_worlds():
    """Each rank a newcomer, exact, or touched with or without a copy, at one of two commits."""
    kinds = [
        NEWCOMER,
        *(report(0, commit, exact, copy) for commit in (4, 5) for exact, copy in [(True, 3), (False, 3)]),
    ]
    kinds += [report(0, 5, False, None), report(0, 5, False, 5)]
    for size in range(1, 5):
        for world in product(kinds, repeat=size):
            reports = numbered(*world)
            offers = {each.rank: each.offer for each in reports}
            known = [offer for offer in offers.values() if offer is not None]
            if all(each.commit is None for each in reports):
                assert decide(reports).present
            elif not known:
                with pytest.raises(InvalidRequestError):
                    decide(reports)
            else:
                check(reports, offers, max(known))


def check(reports, offers, latest):
    found = decide(reports)
    assert (found.commit, offers[found.source], found.present) == (latest, latest, False)
    assert found.receivers == {rank for rank, offer in offers.items() if offer != latest}
    assert found.returning == {rank for rank in offers if offers[rank] == latest and not reports[rank].exact}
    assert found.lost == max(each.commit for each in reports if each.commit is not None) - latest
    exact = [each.rank for each in reports if offers[each.rank] == latest and each.exact]
    assert found.source == min(exact or found.returning)


# A model of training: all ranks make the same cycles, and each is cut off at a place that another one allows.
GRADIENTS, STEP, METRIC, COMMIT = range(4)


@given(
    st.integers(1, 30),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.booleans(),
    st.lists(st.booleans(), min_size=0, max_size=3),
)
def test_no_commit_is_lost_wherever_a_cycle_is_cut_off(commits, places, has_metric, newcomers):
    """In the cycle after ``commits``: 0 is cut off in the gradients, 1 in the metric or a commit later, 2 later."""
    reports = []
    for place in places:
        if place == 0:
            reports.append(report(0, commits, exact=True, copy=commits if has_metric else 0))
        elif has_metric and place == 1:
            reports.append(report(0, commits, exact=False, copy=commits))
        else:
            reports.append(report(0, commits + 1, exact=True, copy=commits + 1 if has_metric else 0))
    found = decide(numbered(*reports, *(NEWCOMER for _ in newcomers)))
    assert found.commit == max(each.commit for each in reports)
    assert found.lost == 0


def test_versions_that_differ_name_the_ranks():
    check_versions({0: "1.0", 1: "1.0"})
    with pytest.raises(InvalidRequestError, match=r"1\.0 on ranks 0, 2, 1\.1 on rank 1; install one version"):
        check_versions({0: "1.0", 1: "1.1", 2: "1.0"})


def test_the_first_entry_that_differs_is_named():
    layout = [("model.weight", "float32 (2, 3)"), ("model.bias", "float32 (2,)")]
    assert difference({0: layout, 1: list(layout)}) is None
    other = [layout[0], ("model.bias", "float32 (4,)")]
    assert difference({0: layout, 1: other, 2: layout}) == (
        "the states of the ranks differ, first in model.bias: float32 (2,) on ranks 0, 2, model.bias: float32 (4,) on "
        "rank 1; make the same state on all ranks"
    )
    assert "nothing more on rank 1" in difference({0: layout, 1: layout[:1]})


def test_one_layout_has_one_digest():
    reports = numbered(report(0, 1), report(0, 2))
    assert have_one_layout(reports)
    assert not have_one_layout([reports[0], replace(reports[1], layout="other")])
