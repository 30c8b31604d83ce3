"""What the ranks say of the gradients of a bucket, and where they differ."""

import re

import pytest

from hvd_cluster.comparison.twins import ModelPlace
from hvd_cluster.gradients.duplicate_names import Proposal
from hvd_cluster.gradients.layout import (
    ABSENT,
    DENSE,
    FROZEN,
    as_rows,
    common_sparse,
    differences,
    fingerprint,
    from_rows,
    has_news,
)


def layouts(*kinds_of_ranks, count=3, known=0):
    return [(rank, [(kind, count, known) for kind in kinds]) for rank, kinds in enumerate(kinds_of_ranks)]


def test_statements_travel_as_rows():
    proposals = [Proposal(2, True, 0b101, ModelPlace(1, 2)), Proposal(0, False, 0)]
    entries = [[(DENSE, 7, 0), (1, 4, 1)], [(FROZEN, 7, 0)]]
    rows = [*as_rows(0, entries[0], proposals[0], 5), *as_rows(1, entries[1], proposals[1], 0)]
    assert {len(row) for row in rows} == {3}
    found = from_rows([list(map(int, row)) for row in rows])
    assert found == ([(0, entries[0]), (1, entries[1])], proposals, [5, 0])


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ([(DENSE,), (DENSE,)], None),
        ([(ABSENT,), (DENSE,)], None),
        ([(1,), (1,), (ABSENT,)], None),
        ([(FROZEN,), (FROZEN,)], None),
        ([(FROZEN,), (DENSE,)], "'a' is frozen on rank 0, dense on rank 1; .*requires_grad"),
        ([(1,), (DENSE,)], "'a' is sparse in 1 dimension on rank 0, dense on rank 1; .*sparse_as_dense=True"),
        ([(1,), (2,), (2,)], "sparse in 1 dimension on rank 0, sparse in 2 dimensions on ranks 1, 2;"),
        ([(DENSE, DENSE), (DENSE,)], "the bucket has 2 parameters on rank 0, 1 parameters on rank 1"),
    ],
)
def test_the_first_difference_is_named(kinds, said):
    found = differences("ab"[: len(kinds[0])], layouts(*kinds))
    assert found is None if said is None else re.search(said, found)


def test_gradients_of_different_sizes():
    found = differences("a", [(0, [(DENSE, 3, 0)]), (1, [(DENSE, 4, 0)])])
    assert (
        found
        == "the gradient of 'a' is of 3 elements on rank 0, of 4 elements on rank 1; give all ranks the same model"
    )


def test_a_gradient_is_sparse_where_each_rank_that_has_one_says_so():
    found = layouts((1, DENSE, ABSENT, 1), (ABSENT, DENSE, ABSENT, 2))
    assert common_sparse(found) == {0: 1}
    assert has_news(found)
    assert not has_news(layouts((1,), (1,), known=1))
    assert not has_news(layouts((DENSE,), (DENSE,)))


def test_a_tag_differs_with_the_number_and_with_the_sparse_gradients():
    tags = [
        fingerprint(0, {}),
        fingerprint(1, {}),
        fingerprint(0, {0: 1}),
        fingerprint(0, {1: 1}),
        fingerprint(1, {0: 1}),
    ]
    assert tags[0] == 0
    assert len(set(tags)) == len(tags)
    assert all(tag < 1 << 56 for tag in tags)
