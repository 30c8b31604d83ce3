"""The user's view of process sets: groups of ranks that run collectives among themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

from collectives import CollectiveTimeoutError, InvalidRequestError, SettingsError, communicators, mpi_library

MPIRUN = "start the script by mpirun, that of the MPI which mpi4py has loaded, or by hvdrun --mpi"


def check_argument(comm: object) -> object | None:
    """``comm`` of ``init()``: None for all ranks, a list of numbers, or a communicator of mpi4py.

    Raises InvalidRequestError for anything else.
    """
    if comm is None or communicators.is_communicator(comm):
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
    ranks = (
        communicators.ranks_of(mpi_library.loaded_mpi(), comm) if communicators.is_communicator(comm) else tuple(comm)
    )
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
    ranks = communicators.ranks_of(mpi, comm) if communicators.is_communicator(comm) else tuple(comm)
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise InvalidRequestError(
            f"init(comm={comm!r}) must be different ranks of MPI.COMM_WORLD, which has 0 to {size - 1} here "
            f"({mpi_library.describe(mpi)}); if there should be more, {MPIRUN}"
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
            f"the job has {size} ranks, but MPI ({mpi_library.describe(mpi)}) sees {mpi.COMM_WORLD.Get_size()}, so a "
            f"communicator cannot be a process set: {MPIRUN}"
        )
    places = {rank: place for place, rank in enumerate(range(size) if members is None else members)}
    ranks = communicators.ranks_of(mpi, communicator)
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
            mpi_library.spoil(error)
            raise error

    given = communicators.gather(mpi, _communicator_of(mpi, comm, look), json.dumps(own).encode(), look)
    return distinct([json.loads(text) for text in given])


def _communicator_of(mpi: Any, comm: Any, look: communicators.Look) -> Any:
    """That of the job ``comm``. Other ranks of MPI.COMM_WORLD may be another job, or none."""
    if communicators.is_communicator(comm):
        return comm
    if comm is None:
        return mpi.COMM_WORLD
    key = hashlib.sha256(f"the process sets of {comm}".encode()).digest()[: communicators.KEY_BYTES]
    return communicators.create(mpi, comm, key, look)


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


def _as_rank(value: object) -> int:
    """``value``, an integer of any type; InvalidRequestError if it is none."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:  # such as an array of several numbers
            pass
    raise InvalidRequestError(f"a process set is made of integer ranks, not {value!r}")


class ProcessSet:
    """The given global ranks, in ascending order, or those of a communicator of mpi4py.

    Registered by ``init(process_sets=[...])``. ``process_set_id`` is None while the set is not registered. ``mpi_comm``
    is the communicator, None without one; then ``ranks`` is None until ``init()``. Raises InvalidRequestError for
    anything else.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.ranks: list[int] | None = None
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        if communicators.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        elif isinstance(ranks_or_comm, Iterable):
            self.ranks = sorted(map(_as_rank, ranks_or_comm))
        else:
            raise InvalidRequestError(
                f"a process set is made of a list of ranks, such as [0, 1], not {ranks_or_comm!r}; or of an mpi4py "
                "communicator"
            )
        self._own_rank: int | None = None

    def size(self) -> int | None:
        """The number of members; None while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's position in the set; None while unregistered. InvalidRequestError if it is no member."""
        if self.process_set_id is None or self.ranks is None or self._own_rank is None:
            return None
        if self._own_rank not in self.ranks:
            raise InvalidRequestError(f"rank {self._own_rank} is not a member of {self}")
        return self.ranks.index(self._own_rank)

    def included(self) -> bool | None:
        """Whether this process is one of the ranks, registered or not; None before ``init()``."""
        own_rank = global_process_set._own_rank
        return None if own_rank is None or self.ranks is None else own_rank in self.ranks

    def _register(self, id: int, ranks: Sequence[int], own_rank: int) -> None:
        self.process_set_id, self.ranks, self._own_rank = id, list(ranks), own_rank

    def _unregister(self) -> None:
        self.process_set_id = self._own_rank = None

    def __reduce__(self) -> str | tuple[type[ProcessSet], tuple[list[int]]]:
        """Unpickled in another process: that process's own global set, or a set that is not registered there yet."""
        return "global_process_set" if self is global_process_set else (ProcessSet, (self.ranks or [],))

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessSet:
        """Return this set itself: the copy of a model runs its collectives on the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks; id 0. Its ranks are filled in by ``init()``."""
