"""Operations of ranks, without a tensor."""

from __future__ import annotations

from hvd_cluster import basics
from hvd_cluster.operations.arguments import process_set_id
from hvd_cluster.process_sets import ProcessSet, global_process_set

__all__ = ["barrier", "join"]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every member has called it, or has joined."""
    basics.engine().barrier(process_set_id(process_set))


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Return the global rank that joined last, when all members have joined; for ranks that run out of data first.

    Until then this rank takes part in the operations of the others, without data: zeros for a sum or an average (which
    still divides by the full size), no rows for allgather and alltoall, and the neutral element for Min, Max and
    Product. A broadcast must not come from it. ``device`` is accepted for compatibility: -1, or the number of a GPU.
    """
    return basics.engine().join(process_set_id(process_set))
