"""The backward passes that each gradient has seen."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

from hvd_cluster.optimizer.binding import Binding

__all__ = ["Progress"]

P = TypeVar("P")
State: TypeAlias = tuple[object, int]


class Progress(Generic[P]):
    """``countdown`` has the backward passes that each gradient lacks; it is complete at 0, after ``passes`` of them.

    ``states`` has the :meth:`Binding.state` of each gradient after its last pass, or after it was sent.
    """

    def __init__(self, binding: Binding[P], passes: int) -> None:
        self.passes = passes
        self.countdown: dict[P, int] = {}
        self.states: dict[P, State] = {}
        self._binding = binding

    def count(self, parameter: P) -> int:
        """A pass has reached ``parameter``; returns the number of passes that its gradient lacks, below 0 if too many.

        The earlier passes do not count if the gradient was replaced since.
        """
        state = self._binding.state(parameter)
        gradient, version = self.states.get(parameter, (self, 0))
        has_grown = state[0] is gradient and state[1] == version + 1
        self.states[parameter] = state
        return (self.countdown.get(parameter, self.passes) if has_grown else self.passes) - 1

    def set_passes(self, passes: int) -> None:
        """From now on a gradient is complete after ``passes`` passes; those that are complete stay so."""
        self.passes = passes
        self.countdown = {parameter: left for parameter, left in self.countdown.items() if left == 0}

    def changed(self) -> list[P]:
        """Parameters with gradients that were changed after they were complete, or after they were sent."""
        countdown = self.countdown
        return [each for each in self._changed() if countdown.get(each) == 0]

    def partial(self) -> int:
        """The number of passes since the last step, if they are too few; 0 if a gradient is complete, or none is left.

        A gradient that was thrown away since counts no more.
        """
        if self.passes == 1:
            return 0
        changed = set(self._changed())
        left = [left for each, left in self.countdown.items() if each not in changed]
        return self.passes - min(left) if left and 0 < min(left) < self.passes else 0

    def _changed(self) -> list[P]:
        state = self._binding.state
        return [
            each
            for each, (gradient, version) in self.states.items()
            if (now := state(each))[0] is not gradient or now[1] != version
        ]

    def forget(self) -> None:
        """No gradient has seen a pass."""
        self.countdown, self.states = {}, {}
