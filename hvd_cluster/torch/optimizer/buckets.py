"""Parameters of torch whose gradients travel together, and the memory in which small ones do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.optimizer.buckets import SMALL_BYTES, Size

__all__ = ["Bucket", "is_small", "size_of", "views"]


class Bucket:
    """Parameters whose gradients are sent when all of them are ready, and run together.

    ``sparse`` has those whose gradients are sparse, on all ranks, and how many of their dimensions are.
    """

    __slots__ = ("_packs", "parameters", "sparse")

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = tuple(parameters)
        self.sparse: dict[torch.Tensor, int] = {}
        self._packs: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def pack(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of ``gradients``, of one type, in one row; the same memory in each step, as fresh pages are dear."""
        key, sizes = (gradients[0].dtype, gradients[0].device), [gradient.numel() for gradient in gradients]
        pack = self._packs.get(key)
        if pack is None or pack.numel() != sum(sizes):
            pack = self._packs[key] = torch.empty(sum(sizes), dtype=key[0], device=key[1])
        torch._foreach_copy_(views(pack, gradients), list(gradients))
        return pack


def views(pack: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive pieces of ``pack`` in the shapes of ``gradients``."""
    pieces = torch.split(pack, [gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


def size_of(tensor: torch.Tensor) -> Size:
    """The size of ``tensor`` for :func:`hvd_cluster.optimizer.buckets.plan`."""
    return Size(tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.device))


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a gradient is packed with others; a large one travels in place."""
    return tensor.numel() * tensor.element_size() <= SMALL_BYTES
