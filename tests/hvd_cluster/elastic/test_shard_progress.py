"""Which rows an epoch sees when shards of the data come and go with their ranks; all ranks are in this process."""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.elastic import shard_progress
from hvd_cluster.elastic.shard_progress import DataShard, ShardProgress, shares

SIZE = 4


class Ranks:
    """The ranks of a world, each with a shard; ``seen`` counts the rows (shard, row) of each epoch."""

    def __init__(self):
        self.members = []
        self.seen = {}

    def come(self, number, samples, digest=0):
        newcomer = ShardProgress(DataShard(number, samples, digest), SIZE)
        if self.members:
            newcomer.load_state_dict(self.members[0].state_dict())
        self.members.append(newcomer)

    @contextmanager
    def rank(self, rank):
        with mock.patch.object(basics, "rank", return_value=rank):
            yield self.members[rank]

    def meet(self):
        """The number of steps that all of them expect."""
        gathered = [shard_progress.asdict(member._own) for member in self.members]
        with mock.patch.object(shard_progress, "allgather_object", return_value=gathered):
            left = [self._meet(rank) for rank in range(len(self.members))]
        assert len(set(left)) == 1
        if left[0]:
            assert max(self.own(rank)[1] for rank in range(len(self.members))) == left[0]
        return left[0]

    def _meet(self, rank):
        with self.rank(rank) as member:
            return member.meet()

    def own(self, rank):
        with self.rank(rank) as member:
            return member.own

    def step(self):
        """All train a batch."""
        weights = []
        for rank in range(len(self.members)):
            with self.rank(rank) as member:
                first, left = member.own
                rows = range(member._own.samples)[first * SIZE :][:SIZE] if left else ()
                epoch = self.seen.setdefault(member.epoch, Counter())
                epoch.update((member._own.number, row) for row in rows)
                weights.append((len(rows), member.weight, member.weigh(10.0)))
        total = sum(count for count, _, _ in weights)
        for count, weight, ten in weights:
            assert weight == count * len(self.members) / total
            assert ten == 10 * weight
        for member in self.members:
            member.advance()
        assert len({str(member.state_dict()) for member in self.members}) == 1

    def finish(self):
        for _ in range(self.meet()):
            self.step()


def rows(number, stop, times=1):
    return {(number, row): times for row in range(stop)}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
def test_each_row_once_whatever_the_sizes(sizes):
    ranks = Ranks()
    for number, samples in enumerate(sizes):
        ranks.come(number, samples)
    for _ in range(2):
        ranks.finish()
    expected = {key: 1 for number, samples in enumerate(sizes) for key in rows(number, samples)}
    assert ranks.seen == {0: expected, 1: expected}
    assert ranks.members[0].epoch == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=6), st.booleans())
def test_losses_with_successors(losses, also_late):
    """A rank with the same rows goes on with them, whichever rank it is, also some steps later."""
    ranks = Ranks()
    for number in range(3):
        ranks.come(number, 10 + number * 20, digest=number)
    for lost, steps in losses:
        for _ in range(min(steps, ranks.meet() - 1)):
            ranks.step()
        shard = ranks.members.pop(lost)._own
        if also_late and ranks.meet() > 1:
            ranks.step()
        ranks.come(shard.number, shard.samples, shard.digest)
    ranks.finish()
    assert {key for epoch in ranks.seen.values() for key in epoch} >= {*rows(2, 50)}
    assert max(count for epoch in ranks.seen.values() for count in epoch.values()) == 1


def test_a_loss_without_a_successor():
    ranks = Ranks()
    ranks.come(0, 12)
    ranks.come(1, 12)
    ranks.meet()
    ranks.step()
    ranks.members.pop(1)
    ranks.finish()
    ranks.come(1, 12)
    ranks.finish()
    assert ranks.seen == {0: rows(0, 12) | rows(1, SIZE), 1: rows(0, 12) | rows(1, 12)}


def test_the_rest_of_an_epoch_is_lost_with_its_rank():
    """The others have no rows left, so the epoch ends when they begin again."""
    ranks = Ranks()
    ranks.come(0, 4)
    ranks.come(1, 12)
    ranks.meet()
    ranks.step()
    ranks.members.pop(1)
    assert ranks.meet() == 0
    assert (ranks.members[0].epoch, ranks.members[0].step) == (1, 0)
    ranks.finish()
    assert ranks.seen == {0: rows(0, 4) | rows(1, SIZE), 1: rows(0, 4)}


def test_other_rows_begin_anew(caplog):
    ranks = Ranks()
    ranks.come(0, 12)
    ranks.come(1, 12, digest=5)
    ranks.meet()
    ranks.step()
    ranks.members.pop(1)
    ranks.come(1, 12, digest=6)
    ranks.finish()
    assert ranks.seen == {0: rows(0, 12) | rows(1, 12) | rows(1, SIZE, 2)}
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the rows of partition 1 are others, or in another order, than before its task was lost")
    assert "the 1 batches of them that were trained in epoch 0 are trained again" in warning


def test_of_two_ranks_with_one_portion_the_first_trains_it():
    twice = [DataShard(3, 8, 0), DataShard(1, 8, 0), DataShard(3, 8, 0)]
    assert [share.samples for share in shares(twice)] == [8, 8, 0]


def test_no_rows_at_all():
    ranks = Ranks()
    ranks.come(0, 0)
    with pytest.raises(ValueError, match="the 1 ranks that are there have no rows"):
        ranks.meet()


def test_steps_before_the_first_loop():
    ranks = Ranks()
    ranks.come(0, 4)
    with pytest.raises(InvalidRequestError, match="before a loop over the shard"):
        ranks.members[0].advance()
