"""The argument ``comm`` of ``init()``, and process sets from communicators: lists of ranks of MPI."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from operator import index
from typing import Any

from collectives.api import CollectiveTimeoutError, InvalidRequestError, SettingsError
from collectives.backends.mpi.communicators import KEY_BYTES, create, gather, is_communicator, ranks_of
from collectives.backends.mpi.launcher import describe
from collectives.backends.mpi.library import loaded_mpi, spoil
from collectives.backends.mpi.polling import Look

__all__ = [
    "MPIRUN",
    "check_argument",
    "check_same",
    "distinct",
    "given_to_all",
    "members_of",
    "ranks_in_job",
    "sets_of_all",
]

MPIRUN = "start the script by mpirun, that of the MPI which mpi4py has loaded, or by hvdrun --mpi"


def check_argument(comm: object) -> object | None:
    """``comm`` of ``init()``: None for all ranks, a list of numbers, or a communicator of mpi4py.

    Raises InvalidRequestError for anything else.
    """
    if comm is None or is_communicator(comm):
        return comm
    try:
        ranks = [index(rank) for rank in comm]  # type: ignore[attr-defined]
    except TypeError:
        raise InvalidRequestError(
            f"init(comm={comm!r}) must be None for all ranks, a list of ranks of MPI.COMM_WORLD, such as [0, 1], or a "
            "communicator of mpi4py"
        ) from None
    return ranks or None


def check_same(comm: Any, members: Sequence[int]) -> None:
    """Raise InvalidRequestError for a ``comm`` of a later ``init()`` with other ranks than ``members``, the job."""
    if comm is None:
        return
    ranks = ranks_of(loaded_mpi(), comm) if is_communicator(comm) else tuple(comm)
    if ranks != tuple(members):
        raise InvalidRequestError(
            f"init() was called already, with the ranks {list(members)}, not {list(ranks)} of MPI.COMM_WORLD; call "
            "shutdown() first"
        )


def members_of(mpi: Any, comm: Any) -> tuple[int, ...]:
    """The ranks in MPI.COMM_WORLD that ``comm``, as :func:`check_argument` returns it, makes a job of, in its order.

    Raises InvalidRequestError for ranks that MPI does not have, and where this process is none of them.
    """
    world = mpi.COMM_WORLD
    size, own = world.Get_size(), world.Get_rank()
    if comm is None:
        return tuple(range(size))
    ranks = ranks_of(mpi, comm) if is_communicator(comm) else tuple(comm)
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise InvalidRequestError(
            f"init(comm={comm!r}) must be different ranks of MPI.COMM_WORLD, which has 0 to {size - 1} here "
            f"({describe(mpi)}); if there should be more, {MPIRUN}"
        )
    if own not in ranks:
        shown = f"has the ranks {list(ranks)} of MPI.COMM_WORLD" if ranks else "is MPI.COMM_NULL"
        raise InvalidRequestError(
            f"init(comm=...) {shown}, but this process is rank {own} of it: call init() only on ranks of the "
            "communicator, or on all ranks without it and with process_sets for groups of ranks"
        )
    return ranks


def ranks_in_job(mpi: Any, communicator: Any, members: Sequence[int] | None, size: int) -> list[int]:
    """The ranks of ``communicator`` in a job of ``size``, ascending. ``members`` are the ranks of MPI.COMM_WORLD in it.

    None: the job and MPI.COMM_WORLD have the same ranks. Raises InvalidRequestError for a process that is not in the
    job, SettingsError where MPI has not started the job.
    """
    if members is None and mpi.COMM_WORLD.Get_size() != size:
        raise SettingsError(
            f"the job has {size} ranks, but MPI ({describe(mpi)}) sees {mpi.COMM_WORLD.Get_size()}, so a communicator "
            f"cannot be a process set: {MPIRUN}"
        )
    places = {rank: place for place, rank in enumerate(range(size) if members is None else members)}
    ranks = ranks_of(mpi, communicator)
    strangers = [rank for rank in ranks if rank not in places]
    if strangers:
        raise InvalidRequestError(
            f"the communicator of a process set has the ranks {strangers} of MPI.COMM_WORLD, which are not in this job "
            f"of {sorted(places)}; make it from the communicator that init() got"
        )
    return sorted(places[rank] for rank in ranks)


def given_to_all(ranks: Sequence[int]) -> None:
    """Raise InvalidRequestError if ``ranks``, those of a communicator for ``add_process_set()``, are none."""
    if not ranks:
        raise InvalidRequestError(
            "the communicator of the process set is MPI.COMM_NULL on this rank, but all ranks add the same set: give a "
            "list of its ranks instead; only init(process_sets=...) takes a communicator from its members alone"
        )


def sets_of_all(mpi: Any, comm: Any, own: Sequence[Sequence[int]], seconds: float) -> list[list[list[int]]]:
    """The different sets that the ranks have at each place of their lists, the same on all ranks of the job ``comm``.

    ``own`` is the list of this rank. Raises as :func:`distinct`, and CollectiveTimeoutError if other ranks do not call
    this within ``seconds``.
    """

    def look(waited: float) -> None:
        if waited > seconds:
            text = f"some ranks did not give init() a process set from a communicator within {seconds:g} s; all must"
            error = CollectiveTimeoutError(f"{text} give one at the same places of the list, or MPI.COMM_NULL")
            spoil(error)
            raise error

    given = gather(mpi, _communicator_of(mpi, comm, look), json.dumps(own).encode(), look)
    return distinct([json.loads(text) for text in given])


def _communicator_of(mpi: Any, comm: Any, look: Look) -> Any:
    """That of the job ``comm``. Other ranks of MPI.COMM_WORLD may be another job, or none."""
    if is_communicator(comm):
        return comm
    if comm is None:
        return mpi.COMM_WORLD
    key = hashlib.sha256(f"the process sets of {comm}".encode()).digest()[:KEY_BYTES]
    return create(mpi, comm, key, look)


def distinct(given: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """The different sets at each place of the lists of all ranks; ``given[r]`` are those of rank r, which may be empty.

    Raises InvalidRequestError if the lists have different lengths.
    """
    if len({len(sets) for sets in given}) > 1:
        raise InvalidRequestError(
            f"the ranks gave init() {[len(sets) for sets in given]} process sets from communicators; each rank must "
            "give a communicator or MPI.COMM_NULL for each set"
        )
    return [
        [ranks for number, ranks in enumerate(place) if ranks and ranks not in place[:number]]
        for place in zip(*given, strict=True)
    ]
