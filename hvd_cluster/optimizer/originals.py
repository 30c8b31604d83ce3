"""The gradients of a bucket as they were when it was sent."""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar

from hvd_cluster.optimizer.binding import Binding

__all__ = ["Originals"]

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""


class Originals(Generic[P]):
    """Until :meth:`release` each gradient of a bucket stays what it was, and a change of it can be seen.

    With ``is_watched`` False nobody asks for changes, so gradients that travel as a copy are not kept.
    """

    def __init__(self, binding: Binding[P], is_watched: bool) -> None:
        self._binding = binding
        self._is_watched = is_watched
        self._kept: dict[P, tuple[Tensor, Tensor]] = {}

    def outgoing(self, parameter: P, tensor: Tensor) -> Tensor:
        """What travels for ``tensor``, the gradient of ``parameter`` or a dense copy of it: never its own memory."""
        if tensor is not self._binding.gradient(parameter):
            self.watch(parameter)
            return tensor
        held = self._binding.hold(tensor)
        self._kept[parameter] = tensor, held
        return held

    def watch(self, parameter: P) -> None:
        """The gradient of ``parameter`` is about to be copied."""
        if self._is_watched:
            gradient = self._binding.gradient(parameter)
            self._kept[parameter] = gradient, self._binding.hold(gradient)

    def have_changed(self) -> bool:
        """Whether a gradient was replaced, or its elements have changed."""
        gradient, is_unchanged = self._binding.gradient, self._binding.is_unchanged
        return not all(
            gradient(parameter) is sent and is_unchanged(sent, held) for parameter, (sent, held) in self._kept.items()
        )

    def release(self) -> None:
        """The gradients may change now."""
        self._kept.clear()
