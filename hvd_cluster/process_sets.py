"""The user's view of process sets: groups of ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

from collectives.api import InvalidRequestError
from collectives.backends.mpi.communicators import is_communicator

__all__ = ["ProcessSet", "global_process_set"]


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
        if is_communicator(ranks_or_comm):
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
