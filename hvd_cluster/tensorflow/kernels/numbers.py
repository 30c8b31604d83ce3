"""The kernels of numbers that are known when the graph runs: an elastic job changes them."""

from __future__ import annotations

from collections.abc import Callable

from hvd_cluster import basics
from hvd_cluster.tensorflow.native.construction import Construction
from hvd_cluster.tensorflow.native.context import Context

__all__ = ["Number", "NumberOfSet", "is_included", "size_of_set"]


def size_of_set(id: int) -> int:
    """The number of members; InvalidRequestError for an unknown id."""
    return len(basics.engine().process_sets.ranks(id)) if id else basics.size()


def is_included(id: int) -> int:
    """1 if this rank is a member, else 0; InvalidRequestError for an unknown id."""
    engine = basics.engine()
    return int(engine.topology.rank in engine.process_sets.ranks(id))


class Number:
    """A node whose output is the value of a function."""

    def __init__(self, function: Callable[[], int], construction: Construction) -> None:
        self._function = function

    def run(self, context: Context) -> None:
        """Set the output."""
        value = self._function()
        context.output(0, ()).host[0] = value


class NumberOfSet(Number):
    """As :class:`Number`, of a process set."""

    def __init__(self, function: Callable[[int], int], construction: Construction) -> None:
        id = construction.integer("process_set_id")
        super().__init__(lambda: function(id), construction)
