"""Gradients that travel while the user may still read and change them.

torch can share the memory of two tensors until one of them is written to, by whatever name or view: the writer gets a
copy then. So to hold a gradient costs no copy, to see that nobody has written to it costs no comparison, and whoever
writes to it does not disturb its way.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_cluster import memory
from hvd_cluster.operations.operands import Operand
from hvd_cluster.torch.operations.operands import in_place, output
from hvd_cluster.torch.tensors import as_input, shared_buffer, to_buffer

__all__ = ["Spares", "address", "hold", "is_held", "is_shared", "is_unchanged"]

_native: Any = torch._C  # which is not annotated in full
is_held = _native._is_cow_tensor
_lazy_clone = torch._lazy_clone


def _sharers(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_ALONE = _sharers(torch.empty(1))


def is_shared(gradient: torch.Tensor) -> bool:
    """Whether other tensors use the memory: a user's flat buffer, or autograd's, which two parameters may share."""
    return _sharers(gradient) > _ALONE


def address(tensor: torch.Tensor) -> int:
    """Where the elements begin; to ask a tensor itself counts as writing to it."""
    base: int = _native._data_address(tensor)
    return base + int(tensor.storage_offset()) * tensor.element_size()


def hold(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps the present elements of ``gradient``; to be called where autograd records nothing."""
    if not is_shared(gradient):  # otherwise the first writer would copy all of the shared memory
        try:
            return _lazy_clone(gradient)
        except RuntimeError:  # memory that torch did not allocate
            pass
    return _lazy_clone(gradient.clone())


def is_unchanged(gradient: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether ``gradient`` has the elements of ``held``: a function may have asked to write, and changed nothing."""
    if is_held(gradient) and address(gradient) == address(held):
        return True
    if gradient.shape != held.shape or gradient.dtype is not held.dtype:
        return False
    return torch.equal(gradient, held) or bool(((gradient == held) | (gradient.isnan() & held.isnan())).all())


class Spares:
    """The memory of large gradients that have got other memory, for the next results."""

    def __init__(self) -> None:
        self._unused: dict[Any, list[torch.Tensor]] = {}

    def give(self, gradient: torch.Tensor) -> None:
        """``gradient`` is about to get other memory. On a GPU torch keeps unused memory itself."""
        if gradient.is_cpu and gradient.numel() * gradient.element_size() >= memory.MINIMUM:
            self._unused.setdefault((gradient.shape, gradient.dtype), []).append(gradient.detach())

    def _take(self, held: torch.Tensor) -> torch.Tensor:
        spares = self._unused.get((held.shape, held.dtype)) if held.is_cpu else None
        return spares.pop() if spares else torch.empty_like(held, memory_format=torch.contiguous_format)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """For an allreduce in place; if ``tensor`` is held, the result is another tensor."""
        if not is_held(tensor):
            return in_place(tensor)
        source = as_input(tensor)
        if not is_held(source):  # a copy, in the order of elements
            return in_place(source)
        return Operand(shared_buffer(source, address(source)), to_buffer(self._take(source)), output)
