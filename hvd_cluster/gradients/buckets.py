"""Pure: which gradients travel together, and the name of such a bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

SMALL_BYTES = 1 << 17
"""A gradient of at most this size is copied into a bucket: the copy costs less than a pass through the engine."""
BUCKET_BYTES = 1 << 22

P = TypeVar("P", bound=Hashable)
T = TypeVar("T")


class Size(NamedTuple):
    """``bytes`` of one ``kind``, such as a dtype and a device: only gradients of one kind share memory."""

    bytes: int
    kind: Hashable


def plan(
    parameters: Sequence[P], groups: int | Sequence[Sequence[P]] | None, size_of: Callable[[P], Size]
) -> list[list[P]]:
    """The same buckets on all ranks: only the order and the sizes of ``parameters``, and ``groups``, matter.

    With ``groups`` n there are n buckets of nearly the same number of parameters; lists of parameters are one bucket
    each. Otherwise, and for parameters in no list, small gradients of one kind share buckets. The order is the expected
    order of backward: the last parameter first.
    """
    if isinstance(groups, int):
        return chunks(parameters, groups)
    known = set(parameters)
    explicit = [[each for each in group if each in known] for group in groups or ()]
    grouped = {parameter for group in explicit for parameter in group}
    rest = [parameter for parameter in parameters if parameter not in grouped]
    return [group for group in explicit if group] + list(_by_size(rest, size_of))


def chunks(parameters: Sequence[T], count: int) -> list[list[T]]:
    """``count`` lists, or fewer, of nearly the same length."""
    share, more = divmod(len(parameters), count)
    bounds = [number * share + min(number, more) for number in range(min(count, len(parameters)) + 1)]
    return [list(parameters[start:stop]) for start, stop in pairwise(bounds)]


def _by_size(parameters: Sequence[P], size_of: Callable[[P], Size]) -> Iterator[list[P]]:
    filling: dict[Hashable, list[P]] = {}
    for parameter in reversed(parameters):
        size = size_of(parameter)
        if size.bytes > SMALL_BYTES:
            yield [parameter]
            continue
        members = filling.setdefault(size.kind, [])
        members.append(parameter)
        if sum(size_of(member).bytes for member in members) >= BUCKET_BYTES:
            yield filling.pop(size.kind)
    yield from filling.values()


def label(parameters: Sequence[P], names: Mapping[P, str], kind: str = "gradient") -> str:
    """The name of a bucket in messages: its first and its last parameter, frozen or not, as on all ranks.

    ``kind``: what travels.
    """
    first, last = names[parameters[0]], names[parameters[-1]]
    return f"{kind}.{first}" if len(parameters) == 1 else f"{kind}s.{first}..{last}"
