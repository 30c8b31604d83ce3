"""Tensors whose sizes sometimes repeat and sometimes change, so that attempts without the coordinator are declined.

A declined attempt leaves nothing behind: no result, no event, no number, and no memory but what it was given.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives.api import Operation, ReduceOp, Request
from collectives.buffers import Buffer, as_buffer, empty
from collectives.engine.engine import Engine
from collectives.engine.work import Work
from collectives.events import Decided, Failed, Finished, Started, Submitted
from tests.collectives.engine.bypass_job import bypass_of

STEPS = 120
KINDS = ("allreduce", "adasum", "in place", "allgather", "broadcast", "alltoall", "reducescatter", "group")


class Memory:
    """Gives memory for a result, as a framework that gives it once for each shape."""

    def __init__(self, like: Buffer) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._like = like

    def __call__(self, shape: tuple[int, ...]) -> Buffer:
        assert shape not in self.shapes, f"asked twice for {shape}"
        self.shapes.append(shape)
        return empty(self._like.dtype, shape)


class Call:
    """A tensor of a rank in a call, and what it has to become."""

    def __init__(
        self, operation: Operation, arrays: list[np.ndarray[Any, Any]], expected: Any, rank: int, **fields: Any
    ) -> None:
        self.array = arrays[rank].copy()
        self._given, self._expected = self.array.copy(), expected
        self.source = as_buffer(self.array)
        self.is_in_place = bool(fields.pop("in_place", False))
        self.memory = self.source if self.is_in_place else Memory(self.source)
        self.operation, self.fields = operation, fields

    def work(self, name: str, **group: Any) -> Work:
        request = _request(name, self.operation, self.source.dtype, self.source.shape, **self.fields, **group)
        return Work(request, self.source, self.memory)

    def check(self, work: Work) -> None:
        result = work.result()
        np.testing.assert_array_equal(result.host.reshape(result.shape), self._expected)
        if isinstance(self.memory, Memory):
            np.testing.assert_array_equal(self.array, self._given)
            assert result.shape in self.memory.shapes
            if self.operation not in (Operation.ALLGATHER, Operation.ALLTOALL):
                assert self.memory.shapes == [result.shape]


_request = functools.lru_cache(Request)


class Steps:
    """The calls of a rank; all ranks choose alike, and each makes its own part of them."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rank, self._size = engine.topology.rank, engine.topology.size
        self._random = random.Random(seed)
        self._rows: dict[str, list[list[int]]] = {}
        self.calls = self.all_bypass = 0

    def run(self) -> None:
        """Two calls of a kind in turn have the same sizes more often than not."""
        kind = "allgather"
        for _ in range(STEPS):
            if self._random.random() < 0.2:
                kind = self._random.choice(KINDS)
            if kind == "group":
                self._run_group()
            else:
                call = self._call(kind)
                work = call.work(kind)
                self._engine_runs(work)
                call.check(work)
                self.calls += 1
            self.all_bypass += bypass_of(self._engine).on

    def _engine_runs(self, work: Work) -> None:
        """As ``Engine.run`` does with its own work, or submitted first."""
        if self._random.random() < 0.5:
            done = self._engine.run(work.request, work.source, work.destination)
            work.output = done.output
        else:
            self._engine.submit_group([work])
            self._engine.synchronize(work)

    def _run_group(self) -> None:
        kinds = ("allgather", "allreduce", "allgather", "in place", "reducescatter")
        calls = [self._call(kind, f"group {number}") for number, kind in enumerate(kinds)]
        works = [
            call.work(f"group[{number}]", group="group", group_size=len(calls)) for number, call in enumerate(calls)
        ]
        for work in works:
            work.urged = True
        self._engine.submit_group(works)
        for call, work in zip(calls, works, strict=True):
            self._engine.synchronize(work)
            call.check(work)
        self.calls += len(calls)

    def _call(self, kind: str, place: str = "") -> Call:
        rows = self._sizes(kind + place)
        ones = [np.full((count, 2), rank + 1.0) for rank, (count, *_) in enumerate(rows)]
        alike = [np.full((rows[0][0], 2), rank + 1.0) for rank in range(self._size)]
        make: dict[str, Callable[[], Call]] = {
            "allreduce": lambda: Call(Operation.ALLREDUCE, alike, sum(alike), self._rank, op=ReduceOp.SUM),
            "adasum": lambda: Call(Operation.ALLREDUCE, alike, sum(alike) / self._size, self._rank, op=ReduceOp.ADASUM),
            "in place": lambda: Call(
                Operation.ALLREDUCE, alike, 2 * sum(alike), self._rank, op=ReduceOp.SUM, prescale_factor=2.0, in_place=1
            ),
            "allgather": lambda: Call(Operation.ALLGATHER, ones, np.concatenate(ones), self._rank),
            "broadcast": lambda: Call(Operation.BROADCAST, alike, alike[1], self._rank, root_rank=1),
            "alltoall": lambda: self._alltoall(rows),
            "reducescatter": lambda: Call(
                Operation.REDUCESCATTER,
                alike,
                np.array_split(sum(alike), self._size)[self._rank],
                self._rank,
                op=ReduceOp.SUM,
            ),
        }
        return make[kind]()

    def _alltoall(self, rows: list[list[int]]) -> Call:
        arrays = [np.full((sum(of_rank), 2), rank + 1.0) for rank, of_rank in enumerate(rows)]
        expected = [np.full((of_rank[self._rank], 2), rank + 1.0) for rank, of_rank in enumerate(rows)]
        splits = tuple(rows[self._rank])
        return Call(Operation.ALLTOALL, arrays, np.concatenate(expected), self._rank, splits=splits)

    def _sizes(self, key: str) -> list[list[int]]:
        """The numbers of rows of each rank, for each rank: those of the last call, or of some ranks others."""
        draw = self._random
        before = self._rows.setdefault(key, [[3] * self._size for _ in range(self._size)])
        if draw.random() < 0.4:
            most = draw.choice([3, 6, 5000])
            new = [[draw.randint(0, most) for _ in range(self._size)] for _ in range(self._size)]
            self._rows[key] = [each if draw.random() < 0.5 else kept for each, kept in zip(new, before, strict=True)]
        return self._rows[key]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.usefixtures("unhurried")
def test_a_declined_attempt_leaves_nothing_behind(start: Any, size: int) -> None:
    def body(engine: Engine) -> tuple[int, int, list[object]]:
        seen: list[object] = []
        if engine.topology.rank < 2:
            engine.events.subscribe(seen.append)
        steps = Steps(engine, seed=size)
        steps.run()
        [counts] = engine.counts().sets.values()
        assert (counts.tensors, counts.failures) == (steps.calls, 0)
        return steps.calls, steps.all_bypass, seen

    with start(size) as job:
        outcomes = job.run(body)
    for calls, all_bypass, seen in outcomes:
        assert 0.1 * STEPS < all_bypass < 0.9 * STEPS
        if seen:
            names = [
                [name for event in seen if isinstance(event, kind) for name in event.names]
                for kind in (Decided, Started, Finished)
            ]
            assert names[0] == names[1] == names[2]
            assert len(names[0]) == calls == sum(isinstance(event, Submitted) for event in seen)
            assert not any(isinstance(event, Failed) for event in seen)


@pytest.mark.usefixtures("unhurried")
def test_a_rank_that_joins_early_takes_part_in_calls_that_others_repeat(start: Any) -> None:
    """The others attempt what ran last, with a stand-in for the rank that has joined."""

    def body(engine: Engine) -> None:
        rank = engine.topology.rank
        for epoch in range(8):
            for step in range(12 - 4 * (rank == epoch % 3)):
                rows = [3 if step % 3 else (epoch + step + each) % 5 for each in range(3)]
                present = [each for each in range(3) if each != epoch % 3 or step < 8]
                arrays = {each: np.full((rows[each], 2), each + 1.0) for each in present}
                source = as_buffer(arrays[rank])
                work = engine.run(
                    _request("rows", Operation.ALLGATHER, source.dtype, source.shape), source, Memory(source)
                )
                np.testing.assert_array_equal(work.result().owner, np.concatenate([*arrays.values()]))
            engine.join()

    with start(3) as job:
        job.run(body)
