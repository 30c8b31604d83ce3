"""Which gradients travel together, and the memory in which small ones do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from hvd_cluster.torch.optimizer.arguments import Groups, Names

__all__ = ["Bucket", "is_small", "label", "parts", "plan"]

SMALL_BYTES = 1 << 17
"""Up to here a copy into a bucket costs less than to bring the gradient through the engine on its own."""
BUCKET_BYTES = 1 << 22


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
        torch._foreach_copy_(parts(pack, gradients), list(gradients))
        return pack


def label(bucket: Bucket, names: Names) -> str:
    """What a bucket is called in messages: by its first and its last parameter, frozen or not, as on all ranks."""
    first, last = names[bucket.parameters[0]], names[bucket.parameters[-1]]
    return f"gradient.{first}" if len(bucket.parameters) == 1 else f"gradients.{first}..{last}"


def parts(pack: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of ``pack`` in the shapes of ``gradients``."""
    pieces = torch.split(pack, [gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a gradient is packed with others; a large one travels in place."""
    return tensor.numel() * tensor.element_size() <= SMALL_BYTES


def plan(parameters: Sequence[torch.Tensor], groups: Groups) -> list[Bucket]:
    """The same buckets on all ranks: nothing but order, sizes and types of ``parameters``, and ``groups``, matters.

    With ``groups`` n there are n buckets of nearly the same number of parameters; lists of parameters are one bucket
    each. Otherwise, and for parameters in no list, small gradients of one type share buckets. The order is that in
    which backward is expected to need them: the last parameter first.
    """
    if isinstance(groups, int):
        return _chunks(parameters, groups)
    known = set(parameters)
    explicit = [[each for each in group if each in known] for group in groups or ()]
    grouped = {parameter for group in explicit for parameter in group}
    rest = [parameter for parameter in parameters if parameter not in grouped]
    return [Bucket(group) for group in explicit if group] + list(_by_size(rest))


def _chunks(parameters: Sequence[torch.Tensor], count: int) -> list[Bucket]:
    share, more = divmod(len(parameters), count)
    bounds = [number * share + min(number, more) for number in range(min(count, len(parameters)) + 1)]
    return [Bucket(parameters[start:stop]) for start, stop in pairwise(bounds)]


def _by_size(parameters: Sequence[torch.Tensor]) -> Iterator[Bucket]:
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in reversed(parameters):
        if not is_small(parameter):
            yield Bucket([parameter])
            continue
        members = filling.setdefault((parameter.dtype, parameter.device), [])
        members.append(parameter)
        if sum(member.numel() * member.element_size() for member in members) >= BUCKET_BYTES:
            yield Bucket(filling.pop((parameter.dtype, parameter.device)))
    yield from map(Bucket, filling.values())
