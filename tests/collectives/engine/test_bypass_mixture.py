"""Jobs that are in unison now and then."""

import random

import pytest

from tests.collectives.engine.bypass_job import OneByOne, group_of, rounds_of
from tests.collectives.engine.job import Caller, ones, run, submit, total, wait


class Steps:
    """The steps of the ranks of a job: most have one tensor, some have more, in an order that differs by rank."""

    OTHERS = ("burst", "swapped", "threads", "join", "new", "set", "barrier", "tune")

    def __init__(self, engine, seed):
        self._engine = engine
        self._common, self._own = random.Random(seed), random.Random(f"{seed} {engine.topology.rank}")

    def run(self):
        """How many steps were in unison."""
        count = 0
        for step in range(150):
            kind = self._common.choice(["lone"] * 12 + ["repeated"] * 6 + [*self.OTHERS])
            getattr(self, f"_{kind}")(step)
            count += rounds_of(self._engine).on
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
def test_in_and_out_of_unison(start, seed):
    wrap = OneByOne if seed else lambda channel: channel
    with start(3, wrap=wrap, cache_capacity=[4, 1024, 1024][seed], local_size=[3, 1, 3][seed]) as job:
        counts = job.run(lambda engine: Steps(engine, seed).run())
    assert min(counts) > 20
