"""Calls outside of any graph, whose tensors become ready one after the other, on threads of a framework.

Such a call has a name when it is made, because the order in which tensors become ready is different on each rank.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from collectives import Buffer, Engine, HorovodInternalError, InvalidRequestError, Operation, Work
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.graphs.completer import completer
from hvd_cluster.graphs.lanes import Lanes
from hvd_cluster.graphs.run import NodeRun
from hvd_cluster.ops.arguments import PLAIN_SUM, Reduction
from hvd_cluster.ops.refused_calls import length_of, refuse
from hvd_cluster.ops.submission import process_set_id, submit, submit_group

UNNAMED = 256
"""The number of names for calls of one kind without one; then they repeat, and a later call waits its turn."""

_lanes = Lanes()
_unnamed: WeakKeyDictionary[Engine, defaultdict[Any, Iterator[int]]] = WeakKeyDictionary()


def _number_name(operation: Operation, process_set: ProcessSet, is_group: bool) -> str:
    """The name of the next call without one: the n-th such calls of all ranks are matched."""
    kinds = _unnamed.setdefault(basics.engine(), defaultdict(count))
    return f"noname.{next(kinds[operation, process_set.process_set_id, is_group]) % UNNAMED}"


@contextmanager
def naming(
    operation: Operation, name: Any, process_set: ProcessSet, tensors: Sequence[Any] | None = None
) -> Iterator[str]:
    """Around a public operation, on one tensor or on the group of ``tensors``; gives its name.

    The other ranks hear of a call that is refused.
    """
    where = process_set if isinstance(process_set, ProcessSet) else global_process_set
    length = None if tensors is None else length_of(tensors)
    label = "" if name is None else str(name)
    try:
        label = label or _number_name(operation, where, length is not None)
        yield label
    except InvalidRequestError as error:
        if basics.is_initialized():
            refuse(error, operation, label, where, length)
        raise


class CallBatch:
    """The calls that are made with it in a ``with`` block: they are submitted when all of them are ready.

    Where an engine has no core of its own, a call that travels before the last one is ready takes the core of the
    computation that makes the others ready, and nothing fuses.
    """

    def __init__(self) -> None:
        self._ready: list[PendingCall] = []
        self._names: set[object] = set()
        # Owned by this object, held for an instruction.
        self._lock = threading.Lock()
        self._missing = 1  # the calls, and the end of the block

    def __enter__(self) -> CallBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrive()

    def join(self, name: object) -> bool:
        """One more call is made; False if it takes no part, because it runs after one of the same name here."""
        with self._lock:
            is_first = name not in self._names
            self._names.add(name)
            self._missing += is_first
        return is_first

    def _arrive(self, *calls: PendingCall) -> None:
        with self._lock:
            self._ready += calls
            self._missing -= 1
            is_complete = not self._missing
        for call in self._ready if is_complete else ():
            call.send()

    def ready(self, call: PendingCall) -> None:
        """``call``, which has joined, may be submitted."""
        self._arrive(call)


class PendingCall(ABC):
    """A collective that overwrites ``length`` tensors; they are a group, unless ``is_alone``.

    Calls of one name run in the order in which they were made; those of a ``batch`` wait for one another. A call is
    the ``Kernel`` and the ``KernelContext`` of its run, which the ``completer`` ends.
    """

    step = None
    frame = iteration = 0

    def __init__(
        self,
        operation: Operation,
        length: int,
        name: str,
        process_set: ProcessSet,
        how: Reduction = PLAIN_SUM,
        is_alone: bool = True,
        root_rank: int = -1,
        batch: CallBatch | None = None,
    ) -> None:
        self.process_set = process_set
        self.operation = operation
        self._name, self._length, self._is_alone = name, length, is_alone
        self._how, self._root_rank = how, root_rank
        self._engine = basics.engine()
        self._lane = operation, process_set_id(process_set), name, is_alone
        self._batch = batch if batch is not None and batch.join(self._lane) else None
        self._error: BaseException | None = None
        # Owned by this object, held for an instruction.
        self._lock = threading.Lock()
        self._missing = length + 1  # the tensors, and the turn among calls of one name

    @abstractmethod
    def buffers(self) -> Sequence[Buffer]:
        """The memory of the tensors, which are ready. InvalidRequestError if there is none."""

    @abstractmethod
    def over(self, error: BaseException | None) -> None:
        """The framework goes on with what depends on the tensors, or with the ``error``; from any thread."""

    def take_turn(self) -> None:
        """The call is made: now, or when an earlier one of its name is over, it has its turn."""
        _lanes.enter(self._lane, self.arrive)

    def run(self) -> None:
        """Run the call on this thread, and wait. Raises its error."""
        for work in self._submit():
            self._engine.synchronize(work)

    def arrive(self) -> None:
        """One tensor is ready, or the call has its turn. Nothing is missing any more: submit it. Does not raise."""
        with self._lock:
            self._missing -= 1
            is_ready = not self._missing
        if is_ready and self._batch is not None:
            self._batch.ready(self)
        elif is_ready:
            self.send()

    def send(self) -> None:
        """Submit the call, of which nothing is missing. Does not raise."""
        leave = partial(_lanes.leave, self._lane)
        try:
            completer.follow(NodeRun(self, self, self._engine, self._submit(), self.done, leave, self.step))
        except BaseException as error:  # noqa: BLE001 - the framework raises it
            if isinstance(error, InvalidRequestError):
                length = None if self._is_alone else self._length
                refuse(error, self.operation, self._name, self.process_set, length)
            self._error = error
            self.done()
            leave()

    def _submit(self) -> Sequence[Work]:
        pairs, how = [(buffer, buffer) for buffer in self.buffers()], self._how
        where, root = (self._name, self.process_set), self._root_rank
        if not self._is_alone:
            return submit_group(self.operation, pairs, *where, how, engine=self._engine, root_rank=root)
        source, destination = pairs[0]
        return [submit(self.operation, source, destination, *where, how, engine=self._engine, root_rank=root)]

    def finish(self, context: Any, engine: Engine, works: Sequence[Work]) -> None:  # noqa: B027
        """There are no outputs besides the tensors."""

    def end(self) -> None:  # noqa: B027
        """Nobody asks for outputs."""

    def report(self, error: BaseException | None = None) -> None:
        """The call ends with ``error``."""
        self._error = error or HorovodInternalError(f"{self.operation.value} {self._name!r} was abandoned")

    def done(self) -> None:
        """The call has ended."""
        self.over(self._error)


def forget() -> None:
    """In a forked child: calls in flight are the parent's."""
    global _lanes  # noqa: PLW0603 - its lock may be held
    _lanes = Lanes()
