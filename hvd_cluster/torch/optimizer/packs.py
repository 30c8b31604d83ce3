"""The memory in which small gradients travel together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Pack", "views"]


class Pack:
    """One row of memory for gradients of ``shapes``, of one type.

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


def views(row: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive pieces of ``row`` in the shapes of ``gradients``."""
    pieces = torch.split(row, [gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]
