"""The handlers of the calls of a compiled program. All that may change with the ranks is asked for here."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from collectives import Buffer, DType, Engine, InvalidRequestError, Operation, Work, empty
from hvd_cluster.comparison.rosters import NodeNaming
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.elastic.steps import watchers
from hvd_cluster.graphs.compiled import CallTable, Pending, buffer_at, runs
from hvd_cluster.ops import submission
from hvd_cluster.ops.arguments import PLAIN_SUM, Reduction
from hvd_cluster.ops.refused_calls import refusing
from hvd_cluster.tensorflow.kernels.node import set_with
from hvd_cluster.tensorflow.kernels.table import is_included, size_of_set
from hvd_cluster.tensorflow.native.xla_module import RowRule
from hvd_cluster.tensorflow.native.xla_registry import Addresses

POSITION = "position in the process set"


def _position(id: int) -> int:
    engine = basics.engine()
    return list(engine.process_sets.ranks(id)).index(engine.topology.rank)


NUMBERS: dict[str, Callable[[int], int]] = {
    "HorovodRank": lambda _: basics.rank(),
    "HorovodLocalRank": lambda _: basics.local_rank(),
    "HorovodLocalSize": lambda _: basics.local_size(),
    "HorovodSize": size_of_set,
    "HorovodProcessSetIncluded": is_included,
    POSITION: _position,
}
"""Functions of the id of a process set, by the op whose output is the value."""

_POINTERS = c.POINTER(c.c_void_p)
_INT32, _INT64 = c.POINTER(c.c_int32), c.POINTER(c.c_int64)


@dataclass(frozen=True, slots=True)
class StartCall:
    """Submits the tensors of an operation. ``shapes`` may have unknown dimensions; ``size`` is the number of members.

    The ``name`` is static where ``roster`` is not 0: see :class:`NodeNaming`.
    """

    operation: Operation
    grouped: bool
    name: str
    roster: int
    process_set_id: int
    size: int
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    rows: RowRule
    in_place: bool
    how: Reduction = PLAIN_SUM
    root_rank: int = -1
    tag: int = 0

    def run(self, out: int, inputs: Addresses) -> None:
        """Give the program a ticket."""
        watchers.step_began(in_graph=True)  # XLA may change variables at any point, also if it fails later
        engine = basics.engine()
        outputs = c.cast(out, _POINTERS)
        results = self._results(inputs, outputs)
        name = runs.reserve(_name_in(engine, self.roster, self.name))
        try:
            works = self._submit(engine, self._sources(inputs, results), results, name)
        except BaseException:
            runs.release(name)
            raise
        run = Pending(engine, works, results, name, self.size)
        c.cast(outputs[0], _INT64)[0] = runs.begin(run, self.ticket(inputs))

    def ticket(self, inputs: Addresses) -> int:
        """That of the last call of the program, the operand behind the tensors and the shapes that are not known."""
        shapes = sum(None in shape for shape in self.shapes)
        return int(c.cast(inputs[len(self.shapes) + shapes], _INT64)[0])

    def _known_shapes(self, inputs: Addresses) -> list[tuple[int, ...]]:
        vectors = iter(range(len(self.shapes), 2 * len(self.shapes)))
        return [
            tuple(c.cast(inputs[next(vectors)], _INT32)[: len(shape)]) if None in shape else shape  # type: ignore[misc]
            for shape in self.shapes
        ]

    def _results(self, inputs: Addresses, outputs: Addresses) -> list[Buffer]:
        found = []
        for index, (dtype, shape) in enumerate(zip(self.dtypes, self._known_shapes(inputs), strict=True)):
            made = (self.rows.of(shape[0]), *shape[1:]) if shape else shape
            found.append(buffer_at(outputs[index + 1], dtype, made))
        return found

    def _sources(self, inputs: Addresses, results: Sequence[Buffer]) -> list[Buffer]:
        if not self.in_place:
            triples = zip(range(len(self.dtypes)), self.dtypes, self._known_shapes(inputs), strict=True)
            return [buffer_at(inputs[index], dtype, shape) for index, dtype, shape in triples]
        for index, result in enumerate(results):
            if result.count and result.pointer != inputs[index]:
                c.memmove(result.pointer, inputs[index], result.nbytes)
        return list(results)

    def _submit(self, engine: Engine, sources: Sequence[Buffer], results: Sequence[Buffer], name: str) -> list[Work]:
        process_set = set_with(self.process_set_id)
        pairs = [
            (source, result if self.in_place else partial(_memory, result))
            for source, result in zip(sources, results, strict=True)
        ]
        fields: dict[str, Any] = {"engine": engine, "root_rank": self.root_rank, "tag": self.tag}
        with refusing(self.operation, name, process_set, len(pairs) if self.grouped else None):
            self._require_size(process_set)
            if self.grouped:
                return submission.submit_group(self.operation, pairs, name, process_set, self.how, **fields)
            return [submission.submit(self.operation, *pairs[0], name, process_set, self.how, **fields)]

    def _require_size(self, process_set: ProcessSet) -> None:
        now = size_of_set(self.process_set_id)
        if not self.in_place and now != self.size:
            raise InvalidRequestError(
                f"{self.operation.label} {self.name!r} was compiled for {self.size} ranks, and there are {now} now, so "
                "its result has another shape; trace the function again, as a new tf.function, after ranks have changed"
            )


def _memory(result: Buffer, shape: tuple[int, ...]) -> Buffer:
    """The memory of the program, or other memory for a result of a shape that it does not expect."""
    return result if shape == result.shape else empty(result.dtype, shape)


@dataclass(frozen=True, slots=True)
class WaitCall:
    """Waits for the operations of as many ``tickets``, which write as many ``results``."""

    tickets: int
    results: int

    def run(self, out: int, inputs: Addresses) -> None:
        """Return when the program may read all results."""
        tickets = [c.cast(inputs[index], _INT64)[0] for index in range(self.tickets)]
        outputs = c.cast(out, _POINTERS)
        runs.end(tickets, outputs[1 : self.results + 1])
        c.cast(outputs[0], _INT64)[0] = tickets[-1]

    def ticket(self, inputs: Addresses) -> int:
        """One of those for which it waits."""
        return int(c.cast(inputs[0], _INT64)[0])


@dataclass(frozen=True, slots=True)
class NumberCall:
    """A number of this rank or its world."""

    op: str
    process_set_id: int

    def run(self, out: int, inputs: Addresses) -> None:
        """Answer it."""
        c.cast(out, _INT32)[0] = NUMBERS[self.op](self.process_set_id)


Call: TypeAlias = "StartCall | WaitCall | NumberCall"
calls: CallTable[Call] = CallTable()
_namings: dict[tuple[int, str], NodeNaming] = {}


def _name_in(engine: Engine, roster: int, name: str) -> str:
    if not roster:
        return name
    naming = _namings.setdefault((roster, name), NodeNaming(roster, "", name))
    return naming.name_in(engine) or name


def handle(out: int, inputs: Addresses, number: int) -> None:
    """Do the call with the ``number``. If it fails, nothing of its program is left in flight."""
    call = calls[number]
    try:
        call.run(out, inputs)
    except BaseException:
        if not isinstance(call, NumberCall):
            runs.give_up(call.ticket(inputs))
        raise
