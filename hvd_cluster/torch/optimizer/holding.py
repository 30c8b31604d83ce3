"""Gradients that travel while the user may still read and change them.

torch can share the memory of two tensors until one of them is written to, by whatever name or view: the writer gets a
copy then. So to hold a gradient costs no copy, to see that nobody has written to it costs no comparison, and whoever
writes to it does not disturb its way.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from hvd_cluster.core import memory
from hvd_cluster.ops.operands import Operand
from hvd_cluster.torch.operations.operands import in_place, output
from hvd_cluster.torch.tensors import as_input, shared_buffer, to_buffer

logger = logging.getLogger(__name__)

_native: Any = torch._C  # which is not annotated in full
_NEEDED = [(torch, "_lazy_clone"), (_native, "_is_cow_tensor"), (_native, "_data_address")]
CAN_HOLD = all(hasattr(owner, name) for owner, name in _NEEDED)
"""Whether torch has the functions that this module needs, which are no part of its public API."""
if not CAN_HOLD:
    logger.warning("torch %s cannot share memory until it is written to: gradients travel in step()", torch.__version__)


def _sharers(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _owners(gradient: torch.Tensor) -> int:
    """The parameters that have the very same tensor as their gradient, and its Python object."""
    count: int = gradient._use_count() if hasattr(gradient, "_use_count") else 0
    return count


_ALONE = _sharers(torch.empty(1))
_OWN = _owners(torch.empty(1)) + 1


def is_shared(gradient: torch.Tensor) -> bool:
    """Whether other tensors use the memory: a user's flat buffer, or autograd's, which two parameters may share."""
    return _sharers(gradient) > _ALONE or _owners(gradient) > _OWN


def is_held(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` may share its memory with another one until one of them is written to."""
    return CAN_HOLD and bool(_native._is_cow_tensor(tensor))


def address(tensor: torch.Tensor) -> int:
    """Where the elements begin; to ask a tensor itself counts as writing to it."""
    if not CAN_HOLD:
        return tensor.data_ptr()
    base: int = _native._data_address(tensor)
    return base + int(tensor.storage_offset()) * tensor.element_size()


def hold(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps the present elements of ``gradient``. Needs CAN_HOLD, and to be called without autograd."""
    if not is_shared(gradient):  # otherwise the first writer would copy all of the shared memory
        try:
            return torch._lazy_clone(gradient)
        except RuntimeError:  # memory that torch did not allocate
            pass
    return torch._lazy_clone(gradient.clone())


def is_unchanged(gradient: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether ``gradient`` has the elements of ``held``: a function may have asked to write, and changed nothing."""
    if gradient.shape != held.shape or gradient.dtype is not held.dtype:
        return False
    if is_held(gradient) and address(gradient) == address(held) and gradient.stride() == held.stride():
        return True
    return torch.equal(gradient, held) or bool(((gradient == held) | (gradient.isnan() & held.isnan())).all())


class Spares:
    """The memory of large gradients that have got other memory, for the next results.

    A result that a compressor makes is no spare, so no more gradients are kept than results were taken.
    """

    def __init__(self) -> None:
        self._unused: dict[Any, list[torch.Tensor]] = {}
        self._taken: Counter[Any] = Counter()

    def give(self, gradient: torch.Tensor) -> None:
        """``gradient`` is about to get other memory. On a GPU torch keeps unused memory itself."""
        kind = gradient.shape, gradient.dtype
        if gradient.is_cpu and self._taken[kind]:
            self._taken[kind] -= 1
            self._unused.setdefault(kind, []).append(gradient.detach())

    def _take(self, held: torch.Tensor) -> torch.Tensor:
        kind, spares = (held.shape, held.dtype), None
        if held.is_cpu and held.numel() * held.element_size() >= memory.MINIMUM:
            self._taken[kind] += 1
            spares = self._unused.get(kind)
        return spares.pop() if spares else torch.empty_like(held, memory_format=torch.contiguous_format)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """For an allreduce in place; if ``tensor`` is held, the result is another tensor."""
        if not is_held(tensor):
            return in_place(tensor)
        source = as_input(tensor)
        if not is_held(source):  # a copy, in the order of elements
            return in_place(source)
        return Operand(shared_buffer(source, address(source)), to_buffer(self._take(source)), output)
