"""The names of parameters, under which their gradients travel."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from collectives.api import InvalidRequestError

__all__ = ["complete_names", "given_names"]

P = TypeVar("P", bound=Hashable)


def given_names(
    parameter_groups: Sequence[Sequence[P]], named_parameters: Iterable[tuple[str, P]] | None
) -> dict[P, str]:
    """The user's names; InvalidRequestError unless all parameters have one, or none, and all differ."""
    if named_parameters is None:
        return {}
    names: dict[P, str] = _named(named_parameters)
    unnamed = sum(parameter not in names for group in parameter_groups for parameter in group)
    if unnamed:
        raise InvalidRequestError(
            f"{unnamed} parameters of the optimizer are not in named_parameters; name all parameters, or none"
        )
    return names


def _named(named_parameters: Any) -> dict[Any, str]:
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    wrong = [type(entry).__name__ for entry in named if not isinstance(entry, tuple) or len(entry) != 2]
    if wrong:
        raise InvalidRequestError(
            f"named_parameters must be (name, parameter) pairs, as model.named_parameters() gives, not {wrong[0]}"
        )
    names = [name for name, _ in named]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidRequestError(f"named_parameters uses the names {repeated} more than once; each must be unique")
    return {parameter: name for name, parameter in named}


def complete_names(parameter_groups: Sequence[Sequence[P]], names: Mapping[P, str]) -> dict[P, str]:
    """``names``, and a name for each other parameter: by its position, or by the next position that is free."""
    completed, taken = dict(names), set(names.values())
    for number, group in enumerate(parameter_groups):
        for index, parameter in enumerate(group):
            if parameter not in completed:
                candidates = (f"allreduce.noname.{number}.{position}" for position in count(index))
                completed[parameter] = next(name for name in candidates if name not in taken)
                taken.add(completed[parameter])
    return completed
