"""One run of a node, from its submission to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from collectives import Engine, Work
from hvd_cluster.core.process_sets import ProcessSet

Step: TypeAlias = "int | None"
"""The number of the run of a graph; None for a node that belongs to no graph, whose failure concerns no other one."""


class KernelContext(Protocol):
    """The framework's side of a run."""

    @property
    def step(self) -> Step:
        """The run of the graph."""

    @property
    def frame(self) -> int:
        """The number of the innermost loop; 0 outside of loops."""

    @property
    def iteration(self) -> int:
        """The number of the iteration of that loop."""

    def end(self) -> None:
        """The framework will not be asked for outputs any more."""

    def report(self, error: BaseException | None = None) -> None:
        """The run ends with ``error``; without one, with that of an operation that shall not go on."""


class Kernel(Protocol):
    """The operation of a node."""

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""

    def finish(self, context: Any, engine: Engine, works: Sequence[Work]) -> None:
        """Give the outputs that were not known before ``works`` were done."""


@dataclass(slots=True, eq=False)
class NodeRun:
    """A kernel that has submitted its ``works`` to ``engine``, in the run ``step`` of a graph.

    ``done`` gives it back to the framework; ``leave`` lets the next run begin that waits for its turn.
    ``is_abandoned``: nobody wants its outputs any more. ``error``: that of the submission, which has failed.
    """

    kernel: Kernel
    context: KernelContext
    engine: Engine
    works: Sequence[Work]
    done: Callable[[], None]
    leave: Callable[[], None]
    step: Step
    is_abandoned: bool = False
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether all works are done."""
        return all([work.done for work in self.works])

    def abandon(self) -> None:
        """Let the works end soon, although other ranks may never submit theirs."""
        if not self.is_abandoned:
            self.is_abandoned = True
            self.engine.abandon(self.works)

    def end(self) -> Exception | None:
        """Set the outputs; returns the error if there are none."""
        if self.error is not None:
            return self.error
        try:
            for work in self.works:
                work.outcome()
            self.kernel.finish(self.context, self.engine, self.works)
        except Exception as error:  # noqa: BLE001 - the framework raises it
            return error
        return None

    def cut_off(self, error: Exception) -> None:
        """Set an error, although the operation may go on: it keeps the memory of its tensors."""
        self.context.end()
        self.context.report(error)

    def give_back(self) -> None:
        """The framework goes on. The memory of the tensors of works that are done has no other owner then."""
        self.works = ()
        self.done()
