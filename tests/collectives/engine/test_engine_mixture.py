"""Everything at once on engines: a thread for each process set, sets that come and go, groups, joins, a small cache."""

import random
import threading

import numpy as np
import pytest

from collectives.api import Operation, ReduceOp, Request
from collectives.buffers import as_buffer, empty
from collectives.engine.work import Work
from tests.collectives.engine.job import ones, outcome, run, running, submit, wait

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
