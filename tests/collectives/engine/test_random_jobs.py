"""Everything at once on engines: threads, sets that come and go, groups, joins, a small cache, the bypass."""

import random
import threading

import numpy as np
import pytest

from collectives.api import MismatchError, Operation, ReduceOp, Request
from collectives.buffers import as_buffer, empty
from collectives.engine.work import Work
from tests.collectives.engine.bypass_job import (
    NAMES,
    OneByOne,
    bypass_of,
    group_of,
    in_halves,
    together,
    whole,
)
from tests.collectives.engine.job import Caller, ones, outcome, run, running, submit, total, wait

RANKS = (0, 1, 2, 3)
SETS = [(0, 1), (1, 2, 3), (0, 2)]
DTYPES = [np.float32, np.float64, np.int32]


class Mixture:
    """The calls of one rank. From ``seed`` all ranks know all calls, and how many of them each rank makes."""

    def __init__(self, engine, seed):
        self._engine = engine
        self._rank = engine.topology.rank
        self._seed = seed

    def run(self):
        """The errors on the threads of this rank."""
        bodies = [lambda id=id, members=members: self._epochs(id, members) for id, members in enumerate([RANKS, *SETS])]
        mine = [body for body, members in zip(bodies, [RANKS, *SETS], strict=True) if self._rank in members]
        problems = []
        threads = [
            threading.Thread(target=lambda body=body: problems.append(outcome(body)))
            for body in [*mine, self._come_and_go]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [problem for problem in problems if problem is not None]

    def _come_and_go(self):
        common = random.Random(f"{self._seed} come and go")
        for _ in range(4):
            members = common.choice([(0, 3), (1, 3), (2, 3), (0, 1, 2), (1, 2)])
            id = self._engine.add_process_set(members)
            if self._rank in members:
                self._epochs(id, members)
            self._engine.remove_process_set(id)

    def _epochs(self, id, members):
        """Three times: each member submits as many calls as it has data for, waits for some, and joins."""
        common, own = random.Random(f"{self._seed} {members}"), random.Random(f"{self._seed} {members} {self._rank}")
        for _ in range(3):
            counts = {member: common.randrange(1, 30) for member in members}
            kinds = [common.choice(["unnamed", "named", "gathered", "grouped"]) for _ in range(30)]
            pending = []
            for number in range(counts[self._rank]):
                with_data = [member + 1 for member in members if counts[member] > number]
                pending += [(work, with_data) for work in self._submit(kinds[number], number, id)]
                if own.random() < 0.2:
                    self._check(*pending.pop(own.randrange(len(pending))))
            assert self._engine.join(id) in members
            for work, with_data in pending:
                self._check(work, with_data)

    def _submit(self, kind, number, id):
        if kind == "gathered":
            rows = np.full(1, self._rank + 1.0)
            return [submit(self._engine, rows, f"rows {number}", operation=Operation.ALLGATHER, process_set=id)]
        if kind == "grouped":
            return self._submit_group(f"group {number}", DTYPES[: 1 + number % 3], id)
        name = None if kind == "unnamed" else f"tensor {number}"
        return [submit(self._engine, ones(self._engine), name, process_set=id)]

    def _submit_group(self, label, dtypes, id):
        works = []
        for place, dtype in enumerate(dtypes):
            source = as_buffer(np.full(3, self._rank + 1, dtype))
            request = Request(
                f"{label} {place}",
                Operation.ALLREDUCE,
                source.dtype,
                source.shape,
                op=ReduceOp.SUM,
                process_set=id,
                group=label,
                group_size=len(dtypes),
            )
            works.append(Work(request, source, lambda shape, dtype=source.dtype: empty(dtype, shape)))
        self._engine.submit_group(works)
        return works

    def _check(self, work, with_data):
        result = wait(self._engine, work).tolist()
        gathered = work.request.operation is Operation.ALLGATHER
        assert result == (with_data if gathered else [sum(with_data)] * 3), work.request.name


@pytest.mark.parametrize("seed", range(4))
def test_every_result_is_right(seed):
    chance = random.Random(seed)
    settings = {
        "cache_capacity": [0, 3, 1024, 3][seed],
        "fusion_threshold": chance.choice([0, 64, 1 << 20]),
        "local_size": chance.choice([1, len(RANKS)]),
    }
    with running(len(RANKS), sets=SETS, **settings) as job:
        assert job.run(lambda engine: Mixture(engine, seed).run()) == [[]] * len(RANKS)
        assert job.run(lambda engine: run(engine, ones(engine))[0]) == [10.0] * len(RANKS)


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
