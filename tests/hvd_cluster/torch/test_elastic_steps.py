"""The ranks of an elastic job make equally many steps in an epoch, after any change, with any sampler."""

import gc
import random

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.sampler import Samplers, samplers
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.torch.elastic import sampler as torch_sampler
from hvd_cluster.torch.elastic.state import TorchState
from tests.hvd_cluster.elastic.worlds import Play, fake_driver

LENGTHS, MOST, TICKS = range(1, 201), 8, 30


@pytest.fixture
def play(monkeypatch):
    """See tests/hvd_cluster/elastic/conftest.py."""
    fake_driver(monkeypatch, torch_sampler)
    return lambda worlds, script, ends_by_loss=(): Play(worlds, ends_by_loss).run(script)


class Plan:
    """A random job: its worlds, the steps at which they end, and what each training does with its sampler."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.worlds, self.losses, self.ends = [tuple(range(chance.randint(1, MOST)))], set(), []
        fresh = MOST
        for end in sorted(chance.sample(range(1, TICKS - 4), 3)):
            present = list(self.worlds[-1])
            gone = chance.sample(present, chance.randint(0, min(3, len(present) - 1)))
            if gone and chance.random() < 0.5:
                self.losses.add(len(self.worlds) - 1)
            count = chance.randint(int(not gone), MOST - len(present) + len(gone)) if len(present) < MOST else 0
            if not gone and not count:
                continue
            coming = tuple(range(fresh, fresh + count))
            fresh += count
            self.worlds.append((*(each for each in present if each not in gone), *coming))
            self.ends.append(end)
        self.commits = chance.choice([1, 1, 2, 3])
        self.options = {
            length: (chance.randint(1, 9), chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.7)
            for length in LENGTHS
        }


class Training:
    """That of a sampler: its batches, and what happens to it in a step of all trainings."""

    def __init__(self, sampler, batch_size, drop_last, records_late, records):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.records_late, self.records = records_late, records
        self.begin()

    def begin(self):
        self.batches = iter(BatchSampler(self.sampler, self.batch_size, self.drop_last))

    def step(self):
        """The number of samples of this rank; None if the epoch was over."""
        batch = next(self.batches, None)
        if batch is None:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self.begin()
        elif not self.records_late:
            self.record()
        return batch and len(batch)

    def record(self):
        if self.records and isinstance(self.sampler, hvd.elastic.ElasticSampler):
            self.sampler.record_batch(0, self.batch_size)


def same(value):
    found = allgather_object(value, "same")
    assert all(each == found[0] for each in found), [each for each in found if each != found[0]]


def train_all(me, plan, state, sampler_of):
    """Trainings over datasets of all lengths, side by side."""

    @run
    def train(state):
        trainings = [Training(sampler_of(length), *plan.options[length]) for length in LENGTHS]
        same([len(each.sampler) for each in trainings])
        while state.tick < TICKS:
            done = [each.step() for each in trainings]
            same(done)
            state.tick += 1
            if me.round < len(plan.ends) and state.tick >= plan.ends[me.round]:
                if me.round not in plan.losses:
                    me.end_world()
                elif me.number not in plan.worlds[me.round + 1]:
                    me.die()
            if state.tick % plan.commits == 0:
                state.commit()
            for each, count in zip(trainings, done, strict=True):
                if each.records_late and count is not None:
                    each.record()

    train(state)


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_make_equally_many_steps_with_samplers_in_the_state(play, seed):
    plan = Plan(seed)

    def script(me):
        made = {f"of_{length}": hvd.elastic.ElasticSampler(range(length), seed=seed) for length in LENGTHS}
        state = TorchState(tick=0, **made)
        train_all(me, plan, state, lambda length: made[f"of_{length}"])
        assert all(getattr(state, name) is sampler for name, sampler in made.items())
        return state.tick, [sampler.state_dict() for sampler in made.values()]

    found = play(plan.worlds, script, plan.losses)
    results = [found[number] for number in plan.worlds[-1]]
    assert all(result == results[0] for result in results)
    assert results[0][0] == TICKS


@pytest.mark.parametrize("kind", ["elastic", "distributed", "both in the state"])
@pytest.mark.parametrize("seed", range(2))
def test_all_ranks_make_equally_many_steps_with_samplers_that_are_made_once(play, seed, kind):
    """Horovod's PyTorch examples make a DistributedSampler before the training function, in no state."""
    plan = Plan(100 + seed)

    def made_of(length):
        if kind == "elastic":
            return hvd.elastic.ElasticSampler(range(length))
        numbers = {"num_replicas": basics.size(), "rank": basics.rank(), "drop_last": length % 2 == 0}
        return DistributedSampler(range(length + MOST), **numbers)

    def script(me):
        made = {length: made_of(length) for length in LENGTHS}
        kept = {"first": made[1], "last": made[200]} if kind == "both in the state" else {}
        state = TorchState(tick=0, **kept)
        train_all(me, plan, state, made.get)
        assert all(getattr(state, name) in made.values() for name in kept)
        assert all(sampler.num_replicas == basics.size() for sampler in made.values())
        return state.tick

    found = play(plan.worlds, script, plan.losses)
    assert [found[number] for number in plan.worlds[-1]] == [TICKS] * len(plan.worlds[-1])


def test_a_sampler_in_no_state_begins_its_epoch_anew_and_says_so(play, caplog):
    def script(me):
        sampler = hvd.elastic.ElasticSampler(range(20))
        state = TorchState(tick=0)

        @run
        def train(state):
            if state.tick == 0:
                sampler.record_batch(0, 3)
                state.tick = 1
                me.end_world()
                state.commit()

        train(state)
        return sampler.processed_num, len(sampler)

    assert play([(0, 1), (0, 1, 2)], script) == dict.fromkeys(range(3), (0, 7))
    text = "an ElasticSampler that is in no state forgets the 6 samples"
    assert sum(text in record.getMessage() for record in caplog.records) == 2


class Own(DistributedSampler):
    """Computes something from the numbers, so nobody else may change them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.total_size = -1


def test_samplers_of_other_numbers_or_other_classes_stay_as_they_are(play):
    def script(me):
        other = DistributedSampler(range(40), num_replicas=5, rank=1)
        own = Own(range(40), num_replicas=basics.size(), rank=basics.rank())
        plain = DistributedSampler(range(40), basics.size(), basics.rank(), shuffle=False, seed=4, drop_last=True)
        plain.set_epoch(6)
        numbers = own.num_replicas, own.rank
        state = TorchState(tick=0)

        @run
        def train(state):
            if state.tick == 0:
                state.tick = 1
                me.end_world()
                state.commit()

        train(state)
        assert (other.num_replicas, other.rank) == (5, 1)
        assert (own.num_replicas, own.rank, own.total_size) == (*numbers, -1)
        assert (plain.seed, plain.shuffle, plain.drop_last, plain.epoch) == (4, False, True, 6)
        return list(plain)

    assert play([(0, 1), (0, 1, 2)], script) == {rank: list(range(rank, 39, 3)) for rank in range(3)}


def test_samplers_are_forgotten_with_their_last_reference():
    known = Samplers()
    kept = DistributedSampler(range(3), 1, 0)
    for sampler in (kept, DistributedSampler(range(3), 1, 0)):
        known.add(sampler, lambda sampler, before: seen.append(sampler))
    del sampler
    gc.collect()
    seen = []
    known.begin_world((0, 1))
    assert seen == [kept]
    known.add(kept, lambda *_: None)
    assert len(known._known) == 2


def test_a_job_that_is_not_elastic_does_not_watch_torchs_samplers():
    before = len(samplers._known)
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    assert len(samplers._known) == before
    assert len(sampler) == 4
