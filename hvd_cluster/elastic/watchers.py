"""The states of a process that hear when an optimizer steps: any optimizer may have parameters of any state."""

from __future__ import annotations

import threading
import weakref

from hvd_cluster.elastic.state import ObjectState

__all__ = ["Watchers", "watchers"]


class Watchers:
    """States, as long as they live. The garbage collector may find one at any moment, also while they are told."""

    def __init__(self) -> None:
        self._states: tuple[weakref.ref[ObjectState], ...] = ()
        self._lock = threading.Lock()  # Owner: the thread that adds a state, for a few instructions.

    def add(self, state: ObjectState) -> None:
        """Tell ``state`` of steps from now on."""
        with self._lock:
            alive = [reference for reference in self._states if reference() is not None]
            self._states = (*alive, weakref.ref(state))

    def step_began(self, in_graph: bool = False) -> None:
        """An optimizer is about to change parameters; its gradients are combined. See :meth:`Ledger.step_began`."""
        for reference in self._states:
            state = reference()
            if state is not None:
                state._ledger.step_began(in_graph)


watchers = Watchers()
"""Those of this process, for the optimizers of all frameworks."""
