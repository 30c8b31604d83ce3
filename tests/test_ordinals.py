"""The numbers of optimizers side by side, as a function of what each rank has."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.optimizer.ordinals import propose

names = st.sets(st.sampled_from("abcd"), min_size=1)
old = st.lists(st.tuples(names, st.one_of(st.none(), st.integers(0, 5))), max_size=4)


@given(st.lists(old, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=4))
def test_numbers_differ_from_those_of_rivals_on_every_rank(olds, new):
    """``olds``: what each rank has besides the new ones, which all have."""
    proposals = [propose([*theirs, *((each, None) for each in new)]) for theirs in olds]
    chosen = [max(proposal[-1 - age] for proposal in proposals) for age in range(len(new))][::-1]
    for (first, one), (second, other) in combinations(zip(new, chosen, strict=True), 2):
        assert first.isdisjoint(second) or one != other
    for each, number in zip(new, chosen, strict=True):
        assert all(each.isdisjoint(theirs) or number != taken for rank in olds for theirs, taken in rank)


def test_the_only_one_is_0():
    assert propose([({"a"}, None)]) == [0]
    assert propose([({"a"}, None), ({"b"}, None)]) == [0, 0]
    assert propose([({"a"}, None), ({"a", "b"}, None), ({"b"}, None)]) == [0, 1, 2]
    assert propose([({"a"}, 3), ({"a"}, None)]) == [4]
