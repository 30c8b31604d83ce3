"""The parameters that tuning may change during a job: one frozen value that all ranks use from the same batch on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from collectives.api import LONGEST_SECONDS, InvalidRequestError

__all__ = ["PATIENCE_SECONDS", "Changes", "Parameters"]

PATIENCE_SECONDS = 0.05
MEBIBYTE = 1 << 20
Changes: TypeAlias = Mapping[str, Any]
"""Values for some of the fields of :class:`Parameters`."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Rank 0 makes the first value from its settings; a change travels with the first batch that it holds for.

    Ready tensors are fused into batches of at most ``fusion_threshold`` bytes (0: no fusion). A ready tensor is held
    for at most ``cycle_time`` seconds, in which others may join its batch. A ``patient`` engine has no core of its own:
    for up to ``patience`` seconds it leaves decided batches to callers that wait. ``cache_capacity`` is a number of
    tensor names (0: no cache). ``hierarchical_allreduce`` and ``hierarchical_allgather`` send these operations through
    the stages of a hierarchical backend, where there is one; an allreduce above ``pipeline_piece`` bytes goes through
    them in pieces of at most that size. ``next_round`` is the round of the world that all ranks go to after this step,
    in an elastic job; 0 for none: they stay. ``version`` counts the changes; the coordinator sets it.

    Raises InvalidRequestError for values out of range.
    """

    fusion_threshold: int = 128 * MEBIBYTE
    cycle_time: float = 0.001
    patient: bool = False
    patience: float = PATIENCE_SECONDS
    cache_capacity: int = 1024
    hierarchical_allreduce: bool = True
    hierarchical_allgather: bool = True
    pipeline_piece: int = MEBIBYTE
    next_round: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST_COUNT.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidRequestError(f"parameter {name}={value!r} must be an integer of at least {least}")
        for name in ("cycle_time", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= LONGEST_SECONDS:
                raise InvalidRequestError(
                    f"parameter {name}={value!r} must be a number of seconds, 0 to {LONGEST_SECONDS}"
                )


_LEAST_COUNT = {"fusion_threshold": 0, "cache_capacity": 0, "pipeline_piece": 1, "next_round": 0, "version": 0}
