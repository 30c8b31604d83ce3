"""The parameters of an optimizer, with their names, buckets and compressors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

from hvd_cluster.comparison.models import Model, entry_of
from hvd_cluster.compression import GradientCompressor, compressor_for
from hvd_cluster.optimizer.binding import Binding
from hvd_cluster.optimizer.bucket import Bucket, is_group
from hvd_cluster.optimizer.buckets import label, plan
from hvd_cluster.optimizer.names import complete_names
from hvd_cluster.optimizer.options import Options

__all__ = ["Inventory", "is_same_list", "model_of"]

logger = logging.getLogger(__name__)

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
