"""ElasticSampler as a function of rank and size: what all ranks see together."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics

lengths, sizes = st.integers(0, 60), st.integers(1, 9)
phases = st.lists(st.tuples(sizes, st.integers(1, 5), st.integers(0, 4)), max_size=4)


def sampler(length, rank, size, state=None, **options):
    """That of ``rank``, without processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basics, "rank", lambda: rank)
        patch.setattr(basics, "size", lambda: size)
        made = hvd.elastic.ElasticSampler(range(length), **options)
        if state is not None:
            made.load_state_dict(state)
        return made


def samplers(length, size, state=None, **options):
    return [sampler(length, rank, size, state, **options) for rank in range(size)]


@given(lengths, sizes, st.booleans())
def test_ranks_share_an_epoch(length, size, shuffle):
    each = samplers(length, size, shuffle=shuffle)
    shares = [list(one) for one in each]
    assert {len(share) for share in shares} == {len(each[0])} == {math.ceil(length / size)}
    seen = Counter(index for share in shares for index in share)
    assert set(seen) == set(range(length))
    assert max(seen.values(), default=0) - min(seen.values(), default=0) <= 1  # the repeated ones


def test_the_attributes():
    one = sampler(10, 1, 4, shuffle=False)
    assert (one.epoch, one.processed_num, one.processed_indices) == (0, 0, set())
    assert (one.rank, one.num_replicas, one.num_samples, one.total_size) == (1, 4, 3, 12)
    assert one.remaining_indices == list(range(10))
    assert list(one) == [1, 5, 9]
    assert list(sampler(10, 2, 4, shuffle=False)) == [2, 6, 0]  # repeats the first


def test_few_samples_are_repeated_as_often_as_it_takes():
    assert [list(one) for one in samplers(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]


def test_the_order_depends_on_seed_and_epoch_only():
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 1)):
        each = samplers(50, 2, {"epoch": epoch, "processed_num": 0}, seed=seed)
        assert each[0].remaining_indices == each[1].remaining_indices
        orders[seed, epoch] = tuple(each[0].remaining_indices)
    # Horovod's own: what epoch 1 of seed 0 sees, epoch 0 of seed 1 sees.
    assert orders[0, 1] != orders[0, 0] != orders[1, 1]
    assert orders[0, 1] == tuple(sampler(50, 0, 1, seed=1).remaining_indices)


@given(lengths, phases, sizes)
def test_any_number_of_ranks_sees_the_rest_of_an_epoch_once(length, phases, last):
    state, processed = {"epoch": 3, "processed_num": 0}, []
    for size, batch_size, count in phases:
        each = samplers(length, size, state)
        whole = len(each[0].remaining_indices) // (size * batch_size)
        for number in range(min(count, whole)):
            for one in each:
                processed += list(one)[number * batch_size : (number + 1) * batch_size]
                one.record_batch(number, batch_size)
        state = each[0].state_dict()
        assert all(one.state_dict() == state for one in each)
        assert each[0].processed_indices == set(processed)
    assert set(Counter(processed).values()) <= {1}
    rest = {index for one in samplers(length, last, state) for index in one}
    assert rest == set(range(length)) - set(processed)


def test_a_new_epoch_has_all_samples_again():
    one = sampler(8, 0, 1)
    one.record_batch(0, 8)
    assert one.state_dict() == {"epoch": 0, "processed_num": 8}
    assert sampler(8, 0, 1, one.state_dict()).remaining_indices == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basics, "rank", lambda: 0)
        patch.setattr(basics, "size", lambda: 1)
        one.set_epoch(1)
    assert one.state_dict() == {"epoch": 1, "processed_num": 0}
    assert sorted(one) == list(range(8))


def test_more_may_be_recorded_than_there_is():
    """A last batch that is smaller than the others."""
    state = {"epoch": 0, "processed_num": 12}
    assert [len(one) for one in samplers(10, 3, state)] == [0, 0, 0]


def test_it_needs_to_know_the_ranks():
    with pytest.raises(hvd.HorovodInternalError, match="init"):
        hvd.elastic.ElasticSampler(range(3))


def load_halfway():
    def batches():
        return [batch.tolist() for batch in DataLoader(range(20), batch_size=2, sampler=sampler)]

    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    first = batches()[0]
    sampler.record_batch(0, batch_size=2)
    sampler.reset()
    return first, batches()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_load_the_rest(ranks):
    assert ranks.run(load_halfway) == [
        ([0, 2], [[4, 6], [8, 10], [12, 14], [16, 18]]),
        ([1, 3], [[5, 7], [9, 11], [13, 15], [17, 19]]),
    ]
