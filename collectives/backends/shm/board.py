"""How the ranks of a host decide by themselves whether to run an operation: at the gate they cross anyway."""

from __future__ import annotations

from collections.abc import Callable

from collectives.backends.shm.gate import Disagreement, Gate
from collectives.backends.shm.slabs import Slabs
from collectives.planning.board import Board

__all__ = ["ShmBoard"]


class ShmBoard(Board):
    """The first crossing of an operation compares the values. Before it, an operation writes to its own slabs only."""

    def __init__(self, gate: Gate, slabs: Slabs) -> None:
        self._gate = gate
        self._slabs = slabs

    def attempt(
        self,
        value: int,
        call: Callable[[], None],
        waiting: Callable[[list[int]], None],
        agreed: Callable[[], None],
    ) -> bool:
        """See :class:`Board`."""
        turn = self._slabs.turn
        self._gate.ask(value, waiting, agreed)
        try:
            call()
            if self._gate.is_asking:  # the operation had nothing to exchange
                self._gate.cross()
        except Disagreement:
            self._slabs.turn = turn
            return False
        return True

    def decline(self) -> None:
        """See :class:`Board`."""
        self._gate.arrive()
