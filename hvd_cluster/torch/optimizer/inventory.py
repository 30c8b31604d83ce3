"""The parameters of a torch optimizer: their names, and the buckets in which their gradients travel."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

import torch

from collectives import InvalidRequestError
from hvd_cluster.comparison.models import Model, entry_of
from hvd_cluster.gradients.buckets import Size, label, plan
from hvd_cluster.gradients.compression import GradientCompressor, compressor_for
from hvd_cluster.gradients.options import Options
from hvd_cluster.torch.optimizer.transfers import CAN_HOLD, Bucket

logger = logging.getLogger(__name__)

Names: TypeAlias = dict[torch.Tensor, str]


def given_names(
    parameter_groups: Sequence[Sequence[torch.Tensor]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Names:
    """The user's names; InvalidRequestError unless all parameters have one, or none, and all differ."""
    if named_parameters is None:
        return {}
    names = _named(named_parameters)
    unnamed = sum(parameter not in names for group in parameter_groups for parameter in group)
    if unnamed:
        raise InvalidRequestError(
            f"{unnamed} parameters of the optimizer are not in named_parameters; name all parameters, or none"
        )
    return names


def _named(named_parameters: Any) -> Names:
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


def complete_names(parameter_groups: Sequence[Sequence[torch.Tensor]], names: Mapping[torch.Tensor, str]) -> Names:
    """``names``, and a name for each other parameter: by its position, or by the next position that is free."""
    completed, taken = dict(names), set(names.values())
    for number, group in enumerate(parameter_groups):
        for index, parameter in enumerate(group):
            if parameter not in completed:
                candidates = (f"allreduce.noname.{number}.{position}" for position in count(index))
                completed[parameter] = next(name for name in candidates if name not in taken)
                taken.add(completed[parameter])
    return completed


def model_of(parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str], options: Options) -> Model:
    """``parameters``, as the ranks compare them."""
    entries = [entry_of(names[parameter], parameter) for parameter in parameters]
    return Model(tuple(entries), groups=options.describe_groups(parameters))


def parameter_groups(optimizer: torch.optim.Optimizer) -> Sequence[Sequence[torch.Tensor]]:
    """The parameters of each group of ``optimizer``."""
    return [group["params"] for group in optimizer.param_groups]


def groups_of(optimizer: torch.optim.Optimizer) -> Callable[[], Sequence[Sequence[torch.Tensor]]]:
    """A function that gives the parameters of each group of ``optimizer``, without keeping it in use."""
    reference = weakref.ref(optimizer)

    def groups() -> Sequence[Sequence[torch.Tensor]]:
        optimizer = reference()
        return [] if optimizer is None else parameter_groups(optimizer)

    return groups


def size_of(tensor: torch.Tensor) -> Size:
    """The size of a gradient, or of a parameter."""
    return Size(tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.device))


class Inventory:
    """``groups`` gives the parameters of the optimizer, ``given_names`` are those that the user gave.

    The dicts ``names``, ``buckets`` and ``compressors``, by parameter, stay the same objects. ``is_repeatable``: a
    gradient stays what it is while it travels, and its compressor may begin again with another one.
    """

    def __init__(
        self, groups: Callable[[], Sequence[Sequence[torch.Tensor]]], given_names: Names, options: Options
    ) -> None:
        self.given_names = dict(given_names)
        self.names: Names = {}
        self.parameters: list[torch.Tensor] = []
        self.buckets: dict[torch.Tensor, Bucket] = {}
        self.compressors: dict[torch.Tensor, GradientCompressor] = {}
        self.is_repeatable = False
        self._groups = groups
        self._options = options

    @property
    def all_names(self) -> Names:
        """The name of each parameter of the optimizer."""
        return complete_names(self._groups(), self.given_names | self.names)

    def model(self) -> Model:
        """All parameters, as the ranks compare them."""
        return model_of(self.parameters, self.all_names, self._options)

    def names_in_use(self) -> set[str]:
        """The names of the parameters that have a bucket."""
        return {self.names[parameter] for parameter in self.buckets}

    def all_buckets(self) -> list[Bucket]:
        """Each bucket once, in the order in which all ranks have them."""
        return list(dict.fromkeys(self.buckets.values()))

    def rename(self, names: Sequence[str]) -> None:
        """Let the parameters have ``names``, in their order: those for all ranks."""
        self.names.update(zip(self.parameters, names, strict=True))
        for bucket in self.all_buckets():
            bucket.label = label(bucket.parameters, self.names)

    def arrange(self, parameters: list[torch.Tensor], is_under_way: bool) -> list[torch.Tensor]:
        """Take in the ``parameters`` of the optimizer, which were added or removed; returns those that are gone.

        ``is_under_way``: there are gradients that no step has used. Then nothing is removed: ranks at different points
        would send different buckets.
        """
        gone = []
        if not is_under_way:
            self.parameters = parameters
            gone = self._remove_all_but(set(parameters))
        added = [parameter for parameter in parameters if parameter not in self.buckets]
        self.names.update(self.all_names)
        for parameter in added:
            if parameter not in self.compressors:
                self.compressors[parameter] = compressor_for(self._options.compression, parameter)
        for members in plan(added, self._options.groups, size_of):
            self._add_bucket(members)
        self.is_repeatable = CAN_HOLD and all(each.repeatable for each in self.compressors.values())
        return gone

    def _add_bucket(self, members: Sequence[torch.Tensor]) -> None:
        bucket = Bucket(members, self.compressors)
        bucket.label = label(members, self.names)
        self.buckets.update(dict.fromkeys(bucket.parameters, bucket))
        listed = ", ".join(self.names[parameter] for parameter in members)
        logger.info("%s holds the gradients of: %s", bucket.label, listed)

    def _remove_all_but(self, kept: set[torch.Tensor]) -> list[torch.Tensor]:
        """If parameters are gone, name the others and put them into buckets again, as on a rank that starts now."""
        gone = [parameter for parameter in self.buckets if parameter not in kept]
        if gone:
            self.buckets.clear()
            self.names.clear()
        for parameter in gone:
            del self.compressors[parameter]
        return gone

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
