"""The arguments of ``DistributedOptimizer``, checked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from collectives import InvalidRequestError, ReduceOp, UnsupportedRequestError
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.compression import GradientCompression, require_gradient_compression
from hvd_cluster.ops.arguments import Reduction, as_factor
from hvd_cluster.ops.submission import process_set_id

Groups: TypeAlias = "int | Sequence[Sequence[Any]] | None"
"""A number of groups, or the parameters of each."""

PLACES = ("host", "rank")
"""Where the parameters of a sharded optimizer may lie: once on a host, or once on each rank."""


@dataclass(frozen=True)
class Options:
    """How gradients are combined; the fields are arguments of DistributedOptimizer."""

    compression: GradientCompression
    op: ReduceOp
    gradient_predivide_factor: float
    groups: Groups
    sparse_as_dense: bool
    process_set: ProcessSet
    sharded: bool | str = False
    redundancy: int | None = None

    def describe_groups(self, parameters: Sequence[Any]) -> str:
        """``groups`` and ``sharded`` as a text, the same on all ranks; ``parameters`` are those of the optimizer."""
        if self.sharded:
            others = replace(self, sharded=False, redundancy=None).describe_groups(parameters)
            redundancy = "" if self.redundancy is None else f" redundancy={self.redundancy}"
            return f"sharded={self.sharded!r}{redundancy} {others}".strip()
        if not isinstance(self.groups, list):
            return "" if self.groups is None else f"groups={self.groups}"
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        return f"groups of the parameters {[[places.get(id(each)) for each in group] for group in self.groups]}"

    @cached_property
    def reduction(self) -> Reduction:
        """How gradients are combined."""
        factor = self.gradient_predivide_factor
        return Reduction(self.op, 1 / factor, float(factor))


def check(options: Options) -> None:
    """InvalidRequestError for options that do not go together, NotInitializedError before ``init()``.

    UnsupportedRequestError, which is an InvalidRequestError, for Adasum on a number of ranks that it does not support.
    """
    process_set_id(options.process_set)
    require_gradient_compression(options.compression)
    op, factor = options.op, as_factor(options.gradient_predivide_factor)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise InvalidRequestError(f"op {_written(op)} cannot combine gradients; use Average, Sum or Adasum")
    if not 0 < factor < float("inf"):
        raise InvalidRequestError(f"gradient_predivide_factor={factor} must be a positive number")
    if factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise InvalidRequestError(
            f"gradient_predivide_factor={factor} splits the division of Average and needs op=Average, not "
            f"{_written(op)}"
        )
    if options.sharded not in (False, True, *PLACES):
        raise InvalidRequestError(f"sharded={options.sharded!r} must be False, True, {' or '.join(map(repr, PLACES))}")
    _check_redundancy(options.redundancy, options.sharded)
    if op is ReduceOp.ADASUM:
        _check_adasum(options)


def _check_redundancy(redundancy: Any, sharded: bool | str) -> None:
    if redundancy is None:
        return
    if isinstance(redundancy, bool) or not isinstance(redundancy, int) or redundancy < 0:
        raise InvalidRequestError(
            f"redundancy={redundancy!r} must be None, for a copy on each host, or the number of other hosts with a "
            "copy of each part, from 0 on"
        )
    if not sharded:
        raise InvalidRequestError(
            f"redundancy={redundancy} has a use with sharded only: each rank has the whole state without it; give "
            "sharded=True, or leave out redundancy"
        )


def _written(op: ReduceOp) -> str:
    """As scripts write it."""
    return op.name.capitalize()


def _check_adasum(options: Options) -> None:
    if options.sharded:
        raise InvalidRequestError(
            "op Adasum combines the steps that each rank makes with all parameters, so it cannot be sharded; use "
            "Average or Sum, or leave out sharded"
        )
    size = options.process_set.size() or 1
    if size & (size - 1):
        raise UnsupportedRequestError(
            f"op Adasum needs a power of two of ranks, not {size}; use Average, or a process set of such a size"
        )
    if not hasattr(options.compression, "decompress"):
        raise InvalidRequestError(
            f"op Adasum combines no gradients, so compression={options.compression!r} has no use; give "
            "Compression.none, fp16 or bf16"
        )


def refuse_sharded(sharded: Any, framework: str) -> None:
    """UnsupportedRequestError if an optimizer of ``framework`` is asked for that cannot be sharded."""
    if sharded:
        raise UnsupportedRequestError(
            f"sharded={sharded!r} is not there for optimizers of {framework}: each rank updates all variables of the "
            "model; leave it out, or train with hvd_cluster.torch"
        )


def check_passes(passes: Any) -> None:
    """InvalidRequestError unless ``passes`` is a positive integer."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise InvalidRequestError(f"backward_passes_per_step={passes!r} must be an integer of at least 1")


def as_groups(groups: Any, num_groups: Any, tensor_type: type | tuple[type, ...], noun: str = "parameter") -> Groups:
    """``groups``, or the value of the deprecated ``num_groups``; parameters are instances of ``tensor_type``.

    ``noun`` is the framework's own word for a parameter.
    InvalidRequestError unless it is a positive integer or lists of parameters, each of them in one list only.
    """
    if num_groups != 0:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, list | tuple):
        return _checked(groups, tensor_type, noun)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise InvalidRequestError(f"groups={groups!r} must be a positive integer or a list of lists of {noun}s")
    return groups


def _checked(groups: Sequence[Any], tensor_type: type | tuple[type, ...], noun: str) -> list[list[Any]]:
    if not all(isinstance(group, list | tuple) for group in groups):
        raise InvalidRequestError(f"groups must be a positive integer or a list of lists of {noun}s")
    members = [member for group in groups for member in group]
    wrong = [type(member).__name__ for member in members if not isinstance(member, tensor_type)]
    if wrong:
        raise InvalidRequestError(f"groups must have lists of {noun}s, not of {wrong[0]}")
    if len({id(member) for member in members}) < len(members):
        raise InvalidRequestError(f"groups has a {noun} more than once; put each {noun} into one group")
    return [list(group) for group in groups if group]
