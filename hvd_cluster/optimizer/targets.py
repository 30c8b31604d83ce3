"""The variables of a list of gradients, and which gradients travel together. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from hvd_cluster.optimizer.buckets import Size, label, plan
from hvd_cluster.optimizer.options import Groups

__all__ = ["Bucket", "Target", "buckets", "positional", "unique"]


class Target(NamedTuple):
    """A variable, as the ranks agree on it without messages.

    ``key`` is its identity in this process, ``name`` the same on all ranks; ``bytes`` is the size of its gradient, None
    where the shape is not known.
    """

    key: int
    name: str
    shape: tuple[int, ...] | None
    dtype: Hashable
    bytes: int | None


class Bucket(NamedTuple):
    """The positions of gradients that are sent together, and their name."""

    positions: tuple[int, ...]
    name: str


def positional(name: str, position: int) -> str:
    """``name`` without the numbers with which a framework counts all that one process has made, such as the 2 of
    "dense_2/kernel:0"; ``position`` in the list, the same on all ranks, takes their place.
    """
    return f"{position}." + re.sub(r"_\d+(?=/|$)", "", name.partition(":")[0])


def unique(names: Iterable[str]) -> list[str]:
    """``names``, of which repeated ones get a number: two tensors in flight must not have one name."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        number = counts[name] = counts.get(name, -1) + 1
        found.append(f"{name}.{number}" if number else name)
    return found


def buckets(targets: Sequence[Target], groups: Groups, left_out: Collection[int]) -> list[Bucket]:
    """The buckets for ``targets``, the same on all ranks, in the order of backward.

    ``groups`` has variables, or their number; those whose key is in ``left_out`` do not travel.
    """
    names = dict(enumerate(unique(target.name for target in targets)))
    positions = [position for position, target in enumerate(targets) if target.key not in left_out]
    planned = plan(positions, _positions(groups, targets), lambda position: _size(targets[position]))
    return [Bucket(tuple(members), label(members, names)) for members in planned]


def _positions(groups: Groups, targets: Sequence[Target]) -> int | list[list[int]] | None:
    if groups is None or isinstance(groups, int):
        return groups
    known = {target.key: position for position, target in enumerate(targets)}
    return [[known[id(each)] for each in group if id(each) in known] for group in groups]


def _size(target: Target) -> Size:
    """A gradient of unknown size travels alone."""
    kind: Any = target.dtype
    return Size(1 << 62 if target.bytes is None else target.bytes, kind)
