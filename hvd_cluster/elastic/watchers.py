"""The states of a process that hear when an optimizer steps: any optimizer may have parameters of any state."""

from __future__ import annotations

import threading
import weakref

from hvd_cluster.elastic.state import ObjectState

__all__ = ["Watchers"]


class Watchers:
    """States, as long as they live. The garbage collector may find one at any moment, also while they are told."""

    def __init__(self) -> None:
        self._states: tuple[weakref.ref[ObjectState], ...] = ()
        self._lock = threading.Lock()  # Owner: the thread that adds a state, for a few instructions.

    def add(self, state: ObjectState) -> bool:
        """Tell ``state`` of steps from now on. Returns whether it is the first one ever."""
        with self._lock:
            is_first = not self._states
            alive = [reference for reference in self._states if reference() is not None]
            self._states = (*alive, weakref.ref(state))
        return is_first

    def step_began(self) -> None:
        """An optimizer is about to change parameters; its gradients are combined."""
        for reference in self._states:
            state = reference()
            if state is not None:
                state._ledger.step_began()
