"""The operations on tensors that the optimizer core needs from a framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

from collectives.api import ReduceOp
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.buckets import Size
from hvd_cluster.ops.handles import Handle, HandleGroup

P = TypeVar("P", bound=Hashable, contravariant=True)
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""
InFlight: TypeAlias = Handle | HandleGroup


class Pack(Protocol):
    """Memory that holds several gradients of one kind."""

    @property
    def tensor(self) -> Tensor:
        """The one tensor with the elements of all of them."""

    def spread(self, combined: Tensor, gradients: Sequence[Tensor]) -> None:
        """Copy ``combined``, which may be the tensor itself, into ``gradients``."""


class Tensors(Protocol[P]):
    """The operations that both kinds of distributed optimizers need.

    A parameter is any hashable object with at most one gradient.
    """

    def gradient(self, parameter: P) -> Tensor | None:
        """The gradient of ``parameter``."""

    def is_trained(self, parameter: P) -> bool:
        """Whether backward computes a gradient for ``parameter``."""

    def start_group(
        self, tensors: Sequence[Tensor], name: str, process_set: ProcessSet, fields: Mapping[str, Any]
    ) -> InFlight:
        """Start to combine a group of tensors in place; ``fields`` are those of a request."""

    def wait(self, handle: InFlight) -> Any:
        """Wait for ``handle``; returns its result, or a tuple of results. Raises the engine's errors."""

    def unrecorded(self) -> AbstractContextManager[Any]:
        """Within it automatic differentiation records nothing."""


class DifferenceBinding(Tensors[P], Protocol[P]):
    """For a DifferenceCombiner. Only :meth:`snapshot` is called outside of :meth:`Tensors.unrecorded`."""

    def snapshot(self, parameter: P) -> Tensor:
        """A copy of the values of ``parameter``, which automatic differentiation does not know."""

    def difference(self, parameter: P, start: Tensor) -> Tensor:
        """A new tensor: the values of ``parameter`` less those of ``start``, a snapshot."""

    def move(self, parameter: P, start: Tensor, change: Tensor) -> None:
        """Let the values of ``parameter`` be the sum of ``start``, which may be overwritten, and ``change``."""

    def restore(self, parameter: P, start: Tensor) -> None:
        """Let the values of ``parameter`` be those of ``start``."""

    def is_finite(self, gradient: Tensor) -> bool:
        """Whether no element of ``gradient`` is infinite or NaN."""

    def spoil(self, gradient: Tensor) -> None:
        """Let ``gradient`` have infinite or NaN elements."""


class Binding(Tensors[P], Protocol[P]):
    """For a GradientCombiner.

    Error messages end with a remedy: ``change_remedy`` says how a script changes gradients before the step,
    ``send_remedy`` how it avoids a second backward pass, or the loss of gradients, while the first ones are in flight.
    ``repeat_remedy``: how it avoids that one backward pass computes a gradient several times. ``can_hold``: the
    framework has what :meth:`hold` needs; otherwise it is not called, and no gradient travels before the step.
    """

    change_remedy: str
    send_remedy: str
    repeat_remedy: str
    can_hold: bool

    def set_gradient(self, parameter: P, gradient: Tensor) -> None:
        """Replace the gradient of ``parameter``."""

    def set_zeros(self, parameter: P) -> None:
        """Give ``parameter`` a gradient of zeros."""

    def state(self, parameter: P) -> tuple[object, int]:
        """An object that stands for the gradient, and for no other one as long as it exists; and the version.

        The version grows by one with each change in place.
        """

    def size(self, tensor: Tensor) -> Size:
        """The size of a gradient, or of a parameter."""

    def count(self, parameter: P) -> int:
        """The number of elements."""

    def sparse_dimensions(self, gradient: Tensor) -> int | None:
        """The number of sparse dimensions; None for a dense gradient."""

    def to_sparse(self, gradient: Tensor, dimensions: int) -> Tensor:
        """A dense gradient as a sparse one."""

    def to_dense(self, gradient: Tensor) -> Tensor:
        """A sparse gradient as a dense one."""

    def pack(self, gradients: Sequence[Tensor], earlier: Pack | None) -> Pack:
        """A copy of ``gradients`` in one piece of memory: that of ``earlier`` if it fits."""

    def outgoing(self, gradient: Tensor) -> Tensor:
        """The tensor that travels for ``gradient`` alone: itself, or a copy where others use its memory."""

    def hold(self, gradient: Tensor) -> Tensor:
        """The present elements of ``gradient``, which later changes of it do not reach, to send and to compare.

        Of a sparse gradient its values. The combination of such a tensor gets memory of its own.
        """

    def is_unchanged(self, gradient: Tensor, held: Tensor) -> bool:
        """Whether the elements of ``gradient`` are those of ``held``."""

    def incoming(self, gradient: Tensor, combined: Tensor) -> None:
        """Give ``gradient`` the elements of ``combined``."""

    def placeholder(self, parameter: P) -> Tensor:
        """An empty tensor of a shape that neither a gradient of ``parameter`` nor a pack has."""

    def marker(self) -> Tensor:
        """A small tensor that matches no gradient, pack or placeholder."""

    def start(self, tensor: Tensor, name: str, process_set: ProcessSet, fields: Mapping[str, Any]) -> InFlight:
        """Start to combine a tensor in place."""

    def start_sparse(
        self, gradient: Tensor, name: str, factor: float, op: ReduceOp, process_set: ProcessSet
    ) -> Callable[[], Tensor]:
        """Start to combine a sparse gradient; returns a function that waits for the result.

        ``factor`` divides before the combination and multiplies after it.
        """

    def watch(self, parameter: P) -> Callable[[], None]:
        """Report each complete gradient of ``parameter`` to the core; returns a function that ends this."""
