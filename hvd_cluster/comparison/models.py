"""Pure: how the models of the ranks differ, and whether that does harm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from collectives import name_ranks, with_ranks

Names: TypeAlias = tuple[str, ...]
_SAME_MODEL = "give all ranks the same model"


class Entry(NamedTuple):
    """A tensor of a model. ``shape`` is None where it is not known."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str

    @property
    def kind(self) -> str:
        """Dtype and shape, as text."""
        return f"{self.dtype} of shape {'unknown' if self.shape is None else self.shape}"


def entry_of(name: str, tensor: Any) -> Entry:
    """A tensor or a variable of any framework."""
    dtype = tensor.dtype.__name__ if isinstance(tensor.dtype, type) else getattr(tensor.dtype, "name", tensor.dtype)
    dtype = str(dtype).removeprefix("torch.")
    return Entry(name, tuple(tensor.shape), dtype)


@dataclass(frozen=True)
class Model:
    """The tensors that one rank combines or broadcasts together, in their order.

    ``noun`` is the word for one of them in messages. ``groups`` is the text of an argument that all ranks give alike.
    ``stamp``, of the first one, is no part of the comparison: see :mod:`hvd_cluster.comparison.twins`.
    """

    entries: tuple[Entry, ...]
    noun: str = "parameter"
    groups: str = ""
    stamp: str = field(default="", compare=False)

    @cached_property
    def names(self) -> Names:
        """The names of the tensors."""
        return tuple(entry.name for entry in self.entries)

    @property
    def first_shape(self) -> tuple[int, ...] | None:
        """The shape of the first tensor."""
        return self.entries[0].shape if self.entries else None

    @property
    def summary(self) -> str:
        """The first and the last name."""
        names = self.names
        return f"{names[0]!r} to {names[-1]!r}" if len(names) > 1 else "".join(map(repr, names))

    @cached_property
    def digest(self) -> int:
        """A number of 63 bits, which differs where models differ."""
        text = repr((self.groups, [tuple(entry) for entry in self.entries]))
        return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") >> 1

    def __hash__(self) -> int:
        return self.digest


def difference(models: Mapping[int, Model]) -> str | None:
    """The text of the error, the same on all ranks, for the first tensor in which ``models`` (by rank) differ.

    None where they match by position: only names differ, and no name has other positions on another rank.
    """
    first = next(iter(models.values()))
    if len({model.groups for model in models.values()}) > 1:
        said = {rank: model.groups or "neither groups nor sharded" for rank, model in models.items()}
        return f"the ranks have {with_ranks(said)}; give DistributedOptimizer the same arguments on all ranks"
    place = _first_difference(models)
    if place is None or (_match_by_position(models) and not _are_in_other_order(models)):
        return None
    found = {rank: model.entries[place] for rank, model in models.items() if place < len(model.entries)}
    for entry in found.values():
        having = [rank for rank, model in models.items() if entry.name in model.names]
        if len(having) < len(models):
            others = [rank for rank in models if rank not in having]
            return (
                f"the {first.noun} {entry.name!r}, {entry.kind}, is on {name_ranks(having)} only, and not on "
                f"{name_ranks(others)}; {_SAME_MODEL}"
            )
    return _described(first.noun, place, {rank: found.get(rank) for rank in models})


def _described(noun: str, place: int, found: Mapping[int, Entry | None]) -> str:
    names = {None if entry is None else entry.name for entry in found.values()}
    if len(names) == 1:
        kinds = {rank: entry.kind for rank, entry in found.items() if entry is not None}
        return f"the {noun} {next(iter(names))!r}, number {place}, is {with_ranks(kinds)}; {_SAME_MODEL}"
    texts = {rank: "absent" if entry is None else f"{entry.name!r}, {entry.kind}," for rank, entry in found.items()}
    return f"the {noun} number {place} is {with_ranks(texts)}; {_SAME_MODEL}, with its {noun}s in the same order"


def _first_difference(models: Mapping[int, Model]) -> int | None:
    lengths = [len(model.entries) for model in models.values()]
    for place in range(min(lengths)):
        if len({model.entries[place] for model in models.values()}) > 1:
            return place
    return min(lengths) if len(set(lengths)) > 1 else None


def _match_by_position(models: Mapping[int, Model]) -> bool:
    return len({tuple((entry.shape, entry.dtype) for entry in model.entries) for model in models.values()}) == 1


def _are_in_other_order(models: Mapping[int, Model]) -> bool:
    """Whether a name has other positions on another rank that has it, too."""
    known: dict[str, list[int]] = {}
    for model in models.values():
        own: dict[str, list[int]] = {}
        for place, name in enumerate(model.names):
            own.setdefault(name, []).append(place)
        if any(known.setdefault(name, places) != places for name, places in own.items()):
            return True
    return False


class Told(NamedTuple):
    """The message of a rank at a meeting.

    ``presented`` is the model that it is about to use, ``waiting`` has those for which its threads wait, this one
    included, and ``known`` all models of the rank.
    """

    presented: Model
    waiting: Collection[Model]
    known: Collection[Model]


class Judgement(NamedTuple):
    """``agreed``: the models that all ranks have, with the names for all ranks. ``error``: why they cannot go on."""

    agreed: Mapping[Model, Names]
    error: str | None = None


def judge(told: Mapping[int, Told]) -> Judgement:
    """The same on all ranks. Nothing agreed and no error: the ranks present different models that all of them have.

    Where only names differ, those of the first rank hold for all.
    """
    waiting = [{each.presented, *each.waiting} for each in told.values()]
    common = set.intersection(*waiting)
    if common:
        return Judgement({model: model.names for model in common})
    presented = {rank: each.presented for rank, each in sorted(told.items())}
    if all(set(presented.values()) <= {each.presented, *each.known} for each in told.values()):
        return Judgement({})
    error = difference(presented)
    if error is not None:
        return Judgement({}, error)
    names = next(iter(presented.values())).names
    return Judgement(dict.fromkeys(presented.values(), names))


def crossed(used: Mapping[int, str]) -> str:
    """The text of the error where ranks use different models that all of them have; ``used``: the one of each rank."""
    texts = {rank: f"that with {text}" for rank, text in sorted(used.items())}
    return (
        f"the ranks combine the gradients of different models at the same time: {with_ranks(texts)}; let all ranks "
        "step their optimizers, or take the gradients of their tapes, in the same order"
    )
