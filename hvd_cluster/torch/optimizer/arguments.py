"""What an optimizer is wrapped with: checked, with the defaults filled in."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch

from collectives.api import InvalidRequestError, ReduceOp, UnsupportedRequestError
from hvd_cluster.operations import as_factor, process_set_id
from hvd_cluster.process_sets import ProcessSet
from hvd_cluster.torch.gradient_compression import GradientCompression, require_gradient_compression

__all__ = ["Groups", "Names", "Options", "as_groups", "check", "check_passes", "complete_names", "given_names"]

Names: TypeAlias = dict[torch.Tensor, str]
Groups: TypeAlias = "int | Sequence[Sequence[torch.Tensor]] | None"


@dataclass(frozen=True)
class Options:
    """How gradients are combined; the fields are arguments of DistributedOptimizer."""

    compression: GradientCompression
    op: ReduceOp
    gradient_predivide_factor: float
    groups: Groups
    sparse_as_dense: bool
    process_set: ProcessSet


def check(options: Options) -> None:
    """InvalidRequestError for options that do not go together, NotInitializedError before ``init()``.

    UnsupportedRequestError, which is an InvalidRequestError, for Adasum on a number of ranks that it cannot serve.
    """
    process_set_id(options.process_set)
    require_gradient_compression(options.compression)
    op, factor = options.op, as_factor(options.gradient_predivide_factor)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise InvalidRequestError(f"op={op!r} cannot combine gradients; use Average, Sum or Adasum")
    if not 0 < factor < float("inf"):
        raise InvalidRequestError(f"gradient_predivide_factor={factor} must be a positive number")
    if factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise InvalidRequestError("gradient_predivide_factor splits the division of Average; it needs op=Average")
    if op is ReduceOp.ADASUM:
        _check_adasum(options)


def _check_adasum(options: Options) -> None:
    size = options.process_set.size() or 1
    if size & (size - 1):
        raise UnsupportedRequestError(
            f"op Adasum needs a power of two of ranks, not {size}; use a process set, or Average"
        )
    if not hasattr(options.compression, "decompress"):
        raise InvalidRequestError("op Adasum combines no gradients; use Compression.none, fp16 or bf16 with it")


def check_passes(passes: Any) -> None:
    """InvalidRequestError unless ``passes`` is a positive integer."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise InvalidRequestError(f"backward_passes_per_step={passes!r} must be an integer of at least 1")


def as_groups(groups: Any, num_groups: Any) -> Groups:
    """``groups``, or what the deprecated ``num_groups`` says; InvalidRequestError for what is neither kind."""
    if num_groups != 0:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, list | tuple):
        return _checked(groups)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise InvalidRequestError(f"groups={groups!r} must be a positive integer or a list of lists of parameters")
    return groups


def _checked(groups: Sequence[Any]) -> list[list[torch.Tensor]]:
    if not all(isinstance(group, list | tuple) for group in groups):
        raise InvalidRequestError("groups must be a positive integer or a list of lists of parameters")
    members = [member for group in groups for member in group]
    wrong = [type(member).__name__ for member in members if not isinstance(member, torch.Tensor)]
    if wrong:
        raise InvalidRequestError(f"groups must consist of parameters, which are tensors, not of {wrong[0]}")
    if len(set(members)) < len(members):
        raise InvalidRequestError("a parameter can only appear once in groups")
    return [list(group) for group in groups if group]


def given_names(
    param_groups: Sequence[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Names:
    """The user's names; InvalidRequestError unless all parameters have one, or none, and all differ."""
    if named_parameters is None:
        return {}
    names = _named(named_parameters)
    unnamed = sum(parameter not in names for group in param_groups for parameter in group["params"])
    if unnamed:
        raise InvalidRequestError(
            f"{unnamed} parameters of the optimizer are not in named_parameters; name all or none"
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


def complete_names(param_groups: Sequence[dict[str, Any]], names: Names) -> Names:
    """``names``, and one for each parameter without: that of its place, or of the next one that is free."""
    completed, taken = dict(names), set(names.values())
    for number, group in enumerate(param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in completed:
                places = (f"allreduce.noname.{number}.{place}" for place in count(index))
                completed[parameter] = next(name for name in places if name not in taken)
                taken.add(completed[parameter])
    return completed
