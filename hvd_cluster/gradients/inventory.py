"""The names of parameters, under which their gradients travel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain, count
from operator import is_
from typing import Any, Generic, TypeVar

from collectives.api import InvalidRequestError
from hvd_cluster.comparison.models import Model, entry_of
from hvd_cluster.gradients.binding import Binding
from hvd_cluster.gradients.bucket import Bucket, is_group
from hvd_cluster.gradients.buckets import label, plan
from hvd_cluster.gradients.compression import GradientCompressor, compressor_for
from hvd_cluster.gradients.options import Options

logger = logging.getLogger(__name__)


HashableP = TypeVar("HashableP", bound=Hashable)


def given_names(
    parameter_groups: Sequence[Sequence[HashableP]], named_parameters: Iterable[tuple[str, HashableP]] | None
) -> dict[HashableP, str]:
    """The user's names; InvalidRequestError unless all parameters have one, or none, and all differ."""
    if named_parameters is None:
        return {}
    names: dict[HashableP, str] = _named(named_parameters)
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


def complete_names(
    parameter_groups: Sequence[Sequence[HashableP]], names: Mapping[HashableP, str]
) -> dict[HashableP, str]:
    """``names``, and a name for each other parameter: by its position, or by the next position that is free."""
    completed, taken = dict(names), set(names.values())
    for number, group in enumerate(parameter_groups):
        for index, parameter in enumerate(group):
            if parameter not in completed:
                candidates = (f"allreduce.noname.{number}.{position}" for position in count(index))
                completed[parameter] = next(name for name in candidates if name not in taken)
                taken.add(completed[parameter])
    return completed


P = TypeVar("P")


class Inventory(Generic[P]):
    """``groups`` gives the parameters of the optimizer, ``given_names`` are those that the user gave.

    The dicts ``names``, ``buckets`` and ``compressors``, by parameter, stay the same objects. ``is_repeatable``: a
    gradient stays what it is while it travels, and its compressor may begin again with another one.
    """

    def __init__(
        self,
        binding: Binding[P],
        groups: Callable[[], Sequence[Sequence[P]]],
        given_names: Mapping[P, str],
        options: Options,
    ) -> None:
        self.given_names = dict(given_names)
        self.names: dict[P, str] = {}
        self.parameters: list[P] = []
        self.buckets: dict[P, Bucket[P]] = {}
        self.compressors: dict[P, GradientCompressor] = {}
        self.is_repeatable = False
        self._binding = binding
        self._groups = groups
        self._options = options
        self._watches: dict[P, Callable[[], None]] = {}

    @property
    def all_names(self) -> dict[P, str]:
        """The name of each parameter of the optimizer."""
        return complete_names(self._groups(), self.given_names | self.names)

    def model(self) -> Model:
        """All parameters, as the ranks compare them."""
        return model_of(self.parameters, self.all_names, self._options)

    def rename(self, names: Sequence[str]) -> None:
        """Let the parameters have ``names``, in their order: those for all ranks."""
        self.names.update(zip(self.parameters, names, strict=True))

    def names_in_use(self) -> set[str]:
        """The names of the parameters that have a bucket."""
        return {self.names[parameter] for parameter in self.buckets}

    def adopt(self, is_under_way: bool) -> None:
        """Take in the parameters that were added, removed, or made trainable since the last call.

        ``is_under_way``: there are gradients that no step has used.
        """
        if not self._options.process_set.included():
            return
        parameters = list(chain.from_iterable(self._groups()))
        if not is_same_list(parameters, self.parameters):
            self._arrange(parameters, is_under_way)
        watches, is_trained = self._watches, self._binding.is_trained
        for parameter in parameters:
            if parameter not in watches and is_trained(parameter):
                watches[parameter] = self._binding.watch(parameter)

    def _arrange(self, parameters: list[P], is_under_way: bool) -> None:
        if not is_under_way:  # otherwise ranks at different points would send different buckets
            self.parameters = parameters
            self._remove_all_but(set(parameters))
        added = [parameter for parameter in parameters if parameter not in self.buckets]
        self.names.update(self.all_names)
        for parameter in added:
            if parameter not in self.compressors:
                self.compressors[parameter] = compressor_for(self._options.compression, parameter)
        for members in plan(added, self._options.groups, self._binding.size):
            bucket = Bucket(members, is_group(self._binding, members, self.compressors))
            self.buckets.update(dict.fromkeys(bucket.parameters, bucket))
            listed = ", ".join(self.names[parameter] for parameter in members)
            logger.info("%s holds the gradients of: %s", label(members, self.names), listed)
        self.is_repeatable = self._binding.can_hold and all(each.repeatable for each in self.compressors.values())

    def _remove_all_but(self, kept: set[P]) -> None:
        """If parameters are gone, name the others and put them into buckets again, as on a rank that starts now."""
        gone = [parameter for parameter in self.buckets if parameter not in kept]
        if gone:
            self.buckets.clear()
            self.names.clear()
        for parameter in gone:
            del self.compressors[parameter]
            if parameter in self._watches:
                self._watches.pop(parameter)()

    def begin_again(self) -> None:
        """Name all parameters and put them into buckets again, as on a rank that starts now."""
        self.parameters = []
        self.names.clear()
        self.buckets.clear()
        self.compressors.clear()

    def restart_compressors(self) -> None:
        """Give each parameter a compressor without state."""
        for parameter in self.compressors:
            self.compressors[parameter] = compressor_for(self._options.compression, parameter)

    def release(self) -> None:
        """Watch no gradient any more."""
        for end in self._watches.values():
            end()
        self._watches.clear()


def is_same_list(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists have the same objects, which may have no ``==``."""
    return len(one) == len(other) and all(map(is_, one, other))


def model_of(parameters: Sequence[P], names: Mapping[P, str], options: Options) -> Model:
    """``parameters``, as the ranks compare them."""
    entries = [entry_of(names[parameter], parameter) for parameter in parameters]
    return Model(tuple(entries), groups=options.describe_groups(parameters))
