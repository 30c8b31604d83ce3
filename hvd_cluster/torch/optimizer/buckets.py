"""Torch parameters with gradients that travel together, and the memory for small gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_cluster.optimizer.buckets import SMALL_BYTES, Size

__all__ = ["Bucket", "Pack", "is_small", "size_of", "views"]


class Pack:
    """One row of memory for gradients of ``shapes``, of one type. Each step reuses it, because fresh pages are slow.

    ``tensor`` is the row, and ``pieces`` are views of it in the shapes of the gradients.
    """

    __slots__ = ("pieces", "shapes", "tensor")

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        first, count = gradients[0], sum([gradient.numel() for gradient in gradients])
        self.shapes = [gradient.shape for gradient in gradients]
        self.tensor = torch.empty(count, dtype=first.dtype, device=first.device)
        self.pieces = views(self.tensor, gradients)

    def fill(self, gradients: Sequence[torch.Tensor]) -> None:
        """Copy ``gradients`` into the row."""
        torch._foreach_copy_(self.pieces, list(gradients))

    def spread(self, combined: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Copy ``combined``, which may be the row itself, into ``gradients``."""
        pieces = self.pieces if combined is self.tensor else views(combined, gradients)
        torch._foreach_copy_(list(gradients), pieces)


class Bucket:
    """Parameters with gradients that are sent together, when all of them are ready.

    ``sparse``: the parameters with gradients that are sparse on all ranks -> the number of sparse dimensions.
    """

    __slots__ = ("_packs", "parameters", "sparse")

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = tuple(parameters)
        self.sparse: dict[torch.Tensor, int] = {}
        self._packs: dict[tuple[torch.dtype, torch.device], Pack] = {}

    def pack(self, gradients: Sequence[torch.Tensor]) -> Pack:
        """A copy of ``gradients``, of one type."""
        key = (gradients[0].dtype, gradients[0].device)
        pack = self._packs.get(key)
        if pack is None or pack.shapes != [gradient.shape for gradient in gradients]:
            pack = self._packs[key] = Pack(gradients)
        pack.fill(gradients)
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
