"""What concerns ranks rather than tensors."""

from __future__ import annotations

from hvd_cluster import basics
from hvd_cluster.operations import process_set_id
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.torch.operations.compilation import uncompiled

__all__ = ["barrier", "join"]


@uncompiled
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every member has called it, or has joined."""
    basics.engine().barrier(process_set_id(process_set))


@uncompiled
def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Return the global rank that joined last, when all members have joined; for ranks that run out of data first.

    Until then this rank takes part in what the others submit, without data: zeros for a sum or an average (which still
    divides by the full size), no rows for allgather and alltoall, and what changes nothing for Min, Max and Product. A
    broadcast must not come from it. ``device`` is accepted for compatibility: -1, or the number of a GPU.
    """
    return basics.engine().join(process_set_id(process_set))
