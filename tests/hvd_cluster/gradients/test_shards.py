"""Which rank updates which part of the parameters."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.gradients.shards import ALIGNMENT, ByteRange, cut, deal

SIZES = st.lists(st.integers(0, 5 * ALIGNMENT), max_size=8)


@given(sizes=SIZES, ranks=st.integers(1, 5), planned=st.sampled_from([cut, deal]))
def test_each_byte_has_one_rank_and_a_place_of_its_own(sizes, ranks, planned):
    layout = planned(sizes, ranks)
    seen = {}
    for rank in range(ranks):
        for part in layout.parts(rank):
            for byte in range(part.start, part.stop):
                place = layout.offsets[part.number] + byte
                assert layout.bounds[rank] <= place < layout.bounds[rank + 1]
                assert (part.number, byte) not in seen
                seen[part.number, byte] = place
    assert len(seen) == sum(sizes)
    for number, size in enumerate(sizes):
        counts = layout.counts(number)
        assert sum(counts) == size
        for rank, count in enumerate(counts):
            assert count == sum(part.stop - part.start for part in layout.parts(rank) if part.number == number)
    assert len(set(seen.values())) == len(seen)
    assert all(offset % ALIGNMENT == 0 for offset in [*layout.offsets, *layout.bounds])


@given(sizes=SIZES, ranks=st.integers(1, 5))
def test_equal_parts_differ_by_one_block_at_most(sizes, ranks):
    bounds = cut(sizes, ranks).bounds
    shares = [high - low for low, high in pairwise(bounds)]
    assert max(shares) - min(shares) <= ALIGNMENT


def test_whole_parameters_are_not_cut_and_the_largest_come_first():
    layout = deal([300, 1000, 2000, 900], 2)
    assert [layout.parts(rank) for rank in range(2)] == [
        [ByteRange(0, 0, 300), ByteRange(2, 0, 2000)],
        [ByteRange(1, 0, 1000), ByteRange(3, 0, 900)],
    ]


@pytest.mark.parametrize("planned", [cut, deal])
def test_there_may_be_more_ranks_than_parameters(planned):
    layout = planned([ALIGNMENT], 3)
    assert sum(len(layout.parts(rank)) for rank in range(3)) == 1
