"""Pure: a list of ranks of MPI -> the place of this process in their job."""

from __future__ import annotations

from collections.abc import Sequence

from executors.environments.place import Place
from executors.rendezvous.broadcast import ByMpi

__all__ = ["place_among"]


def place_among(members: Sequence[int], rank: int, node: str) -> Place:
    """The place of the process with this ``rank`` in MPI.COMM_WORLD, one of ``members``, in the order of the job.

    ``node`` is as in :class:`Place`.
    """
    return Place(
        launcher="MPI",
        variable="the size of its communicator",
        rank=list(members).index(rank),
        size=len(members),
        job=f"MPI {','.join(map(str, members))}",
        rendezvous=ByMpi(tuple(members)),
        node=node,
    )
