"""Jobs that are in the bypass now and then."""

import random

import pytest

from collectives.api import MismatchError
from collectives.events import Finished
from tests.collectives.engine.bypass_job import Counting, OneByOne, all_bypass, bypass_of, group_of, round_of
from tests.collectives.engine.job import Caller, ones, outcome, run, submit, total, until, wait


class Steps:
    """The steps of the ranks of a job: most have one tensor, some have more, in an order that differs by rank."""

    OTHERS = ("burst", "swapped", "threads", "join", "new", "set", "barrier", "tune")

    def __init__(self, engine, seed):
        self._engine = engine
        self._common, self._own = random.Random(seed), random.Random(f"{seed} {engine.topology.rank}")

    def run(self):
        """How many steps were in the bypass."""
        count = 0
        for step in range(150):
            kind = self._common.choice(["lone"] * 12 + ["repeated"] * 6 + [*self.OTHERS])
            getattr(self, f"_{kind}")(step)
            count += bypass_of(self._engine).on
        return count

    def _mine(self, factor):
        return ones(self._engine) * factor

    def _check(self, factor, *results):
        size = self._engine.topology.size
        for result in results:
            assert result.tolist() == (total(size) * factor).tolist()

    def _lone(self, step):
        for number in range(self._common.randrange(1, 6)):
            factor = step + number / 8
            self._check(factor, run(self._engine, self._mine(factor), "lone"))

    def _burst(self, step):
        names = [f"burst {number}" for number in range(self._common.randrange(1, 8))]
        self._own.shuffle(names)
        works = [submit(self._engine, self._mine(step), name) for name in names]
        self._check(step, *(wait(self._engine, work) for work in works))

    def _repeated(self, step):
        """The same group and the same tensors several times."""
        names = self._common.choice([("a", "b"), ("b", "c", "d"), ("lone",), ()])
        for number in range(self._common.randrange(2, 7)):
            factor = step + number / 8
            arrays = [self._mine(factor) for _ in range(2)]
            works = [submit(self._engine, self._mine(factor), name) for name in names]
            works += group_of(self._engine, f"group of {len(names)}", arrays)
            if self._own.random() < 0.5:
                self._own.shuffle(works)
            self._check(factor, *(wait(self._engine, work) for work in works))

    def _tune(self, step):
        if self._engine.topology.rank == 0:
            threshold = self._own.choice([0, 40, 1 << 20])
            self._engine.propose(fusion_threshold=threshold)

    def _swapped(self, step):
        names = ["lone", "other"]
        self._own.shuffle(names)
        first = submit(self._engine, self._mine(step), names[0])
        self._check(step, run(self._engine, self._mine(step), names[1]), wait(self._engine, first))

    def _threads(self, step):
        bodies = [lambda engine, name=f"thread {number}": run(engine, self._mine(step), name) for number in range(3)]
        callers = [Caller(self._engine, body=body) for body in bodies]
        self._check(step, *(caller.result() for caller in callers))

    def _join(self, step):
        if self._common.randrange(3) == self._engine.topology.rank:
            assert run(self._engine, self._mine(step), "lone").tolist() == self._mine(step).tolist()
        self._engine.join()

    def _new(self, step):
        self._check(step, run(self._engine, self._mine(step), f"new {step}"))

    def _set(self, step):
        id = self._engine.add_process_set([0, 1])
        if self._engine.topology.rank < 2:
            for _ in range(3):
                result = run(self._engine, self._mine(step), "pair", process_set=id)
                assert result.tolist() == (total(2) * step).tolist()
        self._engine.remove_process_set(id)

    def _barrier(self, step):
        self._engine.barrier()


@pytest.mark.parametrize("seed", range(3))
def test_in_and_out_of_the_bypass(start, seed):
    wrap = OneByOne if seed else lambda channel: channel
    with start(3, wrap=wrap, cache_capacity=[4, 1024, 1024][seed], local_size=[3, 1, 3][seed]) as job:
        counts = job.run(lambda engine: Steps(engine, seed).run())
    assert min(counts) > 20


HALVES = (("a", "b"), ("c", "d", "e"))
NAMES = [name for half in HALVES for name in half]


def together(engine, names, factor=1.0):
    """Submit all tensors, then wait for them; returns the first element of each result, of which all are equal."""
    results = [wait(engine, work) for work in [submit(engine, factor * ones(engine), name) for name in names]]
    assert all((result == result[0]).all() for result in results)
    return [result[0] for result in results]


def in_halves(engine, factor=1.0):
    return [result for half in HALVES for result in together(engine, half, factor)]


def whole(engine, factor=1.0):
    return together(engine, NAMES, factor)


def sums(size, factor=1.0):
    return [factor * total(size)[0]] * len(NAMES)


def learn(job, body):
    """Run ``body`` until the ranks run it without the coordinator."""
    for _ in range(6):
        assert job.run(body) == [sums(job.size)] * job.size
    until(lambda: all_bypass(job))


@pytest.mark.usefixtures("unhurried")
def test_a_step_of_several_batches_is_one_round_without_messages(start):
    with start(3, wrap=Counting, fusion_threshold=60) as job:
        learn(job, whole)
        before = [channel.sent for channel in job.channels]
        rounds = [round_of(engine) for engine in job.engines]
        for step in range(10):
            factor = 1.0 + step
            assert job.run(lambda engine, factor=factor: whole(engine, factor)) == [sums(3, factor)] * 3
        assert [channel.sent for channel in job.channels] == before
        assert [round_of(engine) for engine in job.engines] == [number + 10 for number in rounds]


@pytest.mark.usefixtures("unhurried")
def test_batches_have_numbers_of_one_order_with_and_without_the_coordinator(start):
    def body(engine):
        numbers = []
        engine.events.subscribe(lambda event: numbers.append(event.batch) if isinstance(event, Finished) else None)
        for step in range(12):
            (in_halves if step < 6 or step % 2 else whole)(engine)
        return numbers

    with start(2) as job:
        first, second = job.run(body)
    assert first == second == [*range(len(first))]


@pytest.mark.usefixtures("unhurried")
def test_a_rank_with_other_tensors_brings_all_back_to_the_coordinator(start):
    """The numbers of their schedules differ, even where both ranks attempt one."""
    with start(2) as job:
        for _ in range(5):
            job.run(lambda engine: run(engine, ones(engine), "a"))
        learn(job, whole)
        caller = Caller(job.engines[1], body=whole)
        until(lambda: round_of(job.engines[1]) > round_of(job.engines[0]))
        assert together(job.engines[0], ["a"]) == sums(2)[:1]
        assert together(job.engines[0], NAMES[1:]) == sums(2)[1:]
        assert caller.result() == sums(2)
        learn(job, whole)
        assert job.run(whole) == [sums(2)] * 2


class RepeatedSteps(Steps):
    """Steps that repeat, in halves or whole, among everything else that a job may do."""

    OTHERS = (*Steps.OTHERS, *["step"] * 24, "disturbed", "mismatch")

    def _expect(self, factor, results):
        assert results == [factor * total(self._engine.topology.size)[0]] * len(results)

    def _step(self, step):
        for number in range(self._common.randrange(1, 5)):
            factor = step + number / 8
            call = whole if self._common.random() < 0.6 else in_halves
            self._expect(factor, call(self._engine, factor))

    def _disturbed(self, step):
        """Some ranks submit another tensor first, the others last."""
        names = [*NAMES, "extra"]
        self._own.shuffle(names)
        self._expect(step, together(self._engine, names, step))

    def _mismatch(self, step):
        """The ranks disagree about one tensor of the step."""
        works = [submit(self._engine, self._mine(step), name) for name in NAMES[:-1]]
        bad = submit(self._engine, ones(self._engine, 3 + self._engine.topology.rank), NAMES[-1])
        self._expect(step, [wait(self._engine, work)[0] for work in works])
        assert isinstance(outcome(lambda: wait(self._engine, bad)), MismatchError)


@pytest.mark.parametrize("seed", range(4))
def test_a_job_that_does_everything(start, seed):
    """Mismatches, joins, process sets, new parameters, ranks that decline or are late, several threads."""
    wrap = OneByOne if seed % 2 else lambda channel: channel
    with start(3, wrap=wrap, cache_capacity=[8, 1024, 1024, 1024][seed]) as job:
        counts = job.run(lambda engine: RepeatedSteps(engine, seed).run())
    assert min(counts) > 0
