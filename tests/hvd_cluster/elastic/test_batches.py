"""The samples of a step, and what each rank's mean counts, as functions of rank and size."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.elastic.batches import GlobalBatches, share, weight

lengths, batch_sizes, sizes, seeds = st.integers(1, 60), st.integers(1, 20), st.integers(1, 9), st.integers(0, 5)


def on(rank, size, function):
    """``function()`` as ``rank`` of ``size`` ranks, without processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basics, "rank", lambda: rank)
        patch.setattr(basics, "size", lambda: size)
        return function()


def steps_of(batches, size):
    """Samples and weight of each rank, for each step that is left in the epoch."""
    found = []
    loaded = [on(rank, size, lambda: list(batches)) for rank in range(size)]
    for number in range(len(batches)):
        weights = [on(rank, size, lambda: batches.weight) for rank in range(size)]
        found.append([(loaded[rank][number], weights[rank]) for rank in range(size)])
        batches.advance()
    return found


@given(lengths, batch_sizes, sizes, seeds, st.booleans())
def test_each_epoch_has_each_sample_once_and_shares_differ_by_one(length, batch_size, size, seed, shuffle):
    batches = GlobalBatches(range(length), batch_size, seed, shuffle)
    for epoch in range(2):
        assert (batches.epoch, batches.step) == (epoch, 0)
        seen = Counter()
        for step in steps_of(batches, size):
            counts = [len(samples) if weight else 0 for samples, weight in step]
            assert max(counts) - min(counts) <= 1
            seen.update(sample for samples, weight in step if weight for sample in samples)
        assert seen == Counter(range(length))


@given(lengths, batch_sizes, st.lists(sizes, min_size=1, max_size=5), seeds)
def test_a_step_has_the_same_samples_and_the_same_mean_in_any_world(length, batch_size, worlds, seed):
    """Also where the world changes in the middle of the epoch."""
    values = np.random.RandomState(1).standard_normal(length)
    reference = GlobalBatches(range(length), batch_size, seed)
    expected = [reference.samples(step) for step in range(reference.steps_per_epoch)]
    batches = GlobalBatches(range(length), batch_size, seed)
    for number, samples in enumerate(expected):
        size = worlds[number % len(worlds)]
        restored = GlobalBatches(range(length), batch_size, seed)
        restored.load_state_dict(batches.state_dict())
        step = steps_of(restored, size)[0]
        assert sorted(each for part, weight in step if weight for each in part) == sorted(samples)
        assert all(part for part, _ in step)
        average = sum(weight * values[part].mean() for part, weight in step) / size
        assert average == pytest.approx(values[samples].mean(), rel=1e-12, abs=1e-12)
        batches.advance()


def test_a_rank_without_a_sample_gets_one_that_does_not_count():
    batches = GlobalBatches(range(5), 2, shuffle=False)
    assert [[part for part, _ in step] for step in steps_of(batches, 3)] == [
        [[0], [1], [0]],
        [[2], [3], [2]],
        [[4], [4], [4]],
    ]
    batches = GlobalBatches(range(5), 2, shuffle=False)
    assert [[weight for _, weight in step] for step in steps_of(batches, 3)] == [
        [1.5, 1.5, 0],
        [1.5, 1.5, 0],
        [3, 0, 0],
    ]


def test_the_order_is_fixed_for_ever():
    """A job that goes on with another version of NumPy or of this package sees no sample twice."""
    batches = GlobalBatches(range(10), 5, seed=7)
    assert batches.samples(0).tolist() == [0, 1, 5, 7, 6]
    batches.epoch = 1
    assert batches.samples(0).tolist() == [9, 8, 5, 6, 2]
    assert GlobalBatches(range(10), 5, seed=8).samples(0).tolist() != [0, 1, 5, 7, 6]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = set()
    for seed in range(3):
        batches = GlobalBatches(range(50), 50, seed)
        for epoch in range(3):
            batches.epoch = epoch
            orders.add(tuple(batches.samples(0)))
    assert len(orders) == 9


def test_drop_last():
    batches = GlobalBatches(range(7), 3, drop_last=True)
    assert (len(batches), batches.steps_per_epoch) == (2, 2)
    batches.advance()
    assert len(batches) == 1
    batches.advance()
    assert (batches.epoch, batches.step) == (1, 0)


def test_the_state_of_other_batches():
    state = GlobalBatches(range(7), 3).state_dict()
    with pytest.raises(InvalidRequestError, match="batches with global_batch_size=3, but here global_batch_size is 2"):
        GlobalBatches(range(7), 2).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((range(0), 3), "the dataset has 0 samples, and a batch 3; give"),
        ((range(2), 3, 0, True, True), "of which drop_last leaves nothing"),
        ((range(2), 0), "global_batch_size=0 must be"),
        ((range(2), 2.0), "global_batch_size=2.0 must be"),
        ((range(2), 2, -1), "seed=-1 must be"),
        ((range(2), 2, "a"), "seed='a' must be"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        GlobalBatches(*arguments)


def test_shares_and_weights():
    assert [list(share(range(7), rank, 3)) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [weight(7, rank, 3) for rank in range(3)] == [9 / 7, 6 / 7, 6 / 7]
    assert [weight(6, rank, 3) for rank in range(3)] == [1.0] * 3
