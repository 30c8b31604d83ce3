"""Requirements of every backend that connects a group over a network. ``join`` makes the bootstrap of a member."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, ShutDownError
from collectives.backends.base import Backend, Bootstrap, Group
from collectives.net.interfaces import LOOPBACK
from collectives.store.memory import MemoryStore, PrefixStore
from tests.collectives.backends import offers
from tests.collectives.backends.matrix import abort_from_thread, reduce_until_error, run_matrix
from tests.collectives.backends.members import Member, group_of
from tests.collectives.backends.offers import meet

SOON = 4.0  # What a test that breaks connections may leave behind ends after this timeout.
EMPTY = np.empty(0, np.uint8)
LENGTHS = pytest.mark.parametrize("length", [8, 1_000_000], ids=["direct", "ring"])

Join = Callable[[Group, float, str], Bootstrap]


def connect(join: Join, group, store, timeout=20.0, address=LOOPBACK, patience=20.0) -> Backend:
    """``timeout`` bounds operations, ``patience`` the start."""
    return meet(join(group, timeout, address), store, patience)


def with_backends(join: Join, size, body, timeout=20.0, address=LOOPBACK):
    """See :func:`tests.collectives.backends.offers.with_backends`."""
    store = MemoryStore()
    offers.with_backends(size, lambda rank: connect(join, group_of(size, rank), store, timeout, address), body)


def check_abort_reaches_others(join: Join, length: int) -> None:
    """Also members that do not talk to the aborted one."""

    def body(backend: Backend) -> None:
        if backend.rank == 2:
            abort_from_thread(backend, np.ones(length, np.float32))
        elif backend.rank:  # Rank 0 takes no part, so that nobody can finish.
            assert isinstance(reduce_until_error(backend, length, 20), PeerLostError)
        left.wait(20)

    left = threading.Barrier(4)
    with_backends(join, 4, body, SOON)


def check_silent_member(join: Join, length: int, timeout: float = 1.5) -> None:
    def body(backend: Backend) -> None:
        if backend.rank == 0:
            error = reduce_until_error(backend, length, 20)
            assert isinstance(error, CollectiveTimeoutError)
            assert str(error).startswith("rank 1 on host 'a' did not answer in time")
            assert error.ranks == (1,)
            with pytest.raises(CollectiveTimeoutError):
                backend.barrier()
        noticed.wait(20)

    noticed = threading.Barrier(2)
    with_backends(join, 2, body, timeout)


def check_abort_before_a_call_and_after_close(join: Join) -> None:
    def body(backend: Backend) -> None:
        error = HorovodInternalError("told to stop")
        backend.abort(error)
        for call in (backend.barrier, lambda: backend.allgather_bytes([EMPTY], [EMPTY], [0, 0])):
            with pytest.raises(HorovodInternalError) as caught:
                call()
            assert caught.value is error
        backend.close()
        backend.abort(error)

    with_backends(join, 2, body, SOON)


def check_closing(join: Join, lost=((), ()), said: str = "the connection to rank 0 on host 'a'") -> None:
    """It is idempotent, and peers notice. ``lost``: the ranks and hosts of the error."""

    def body(backend: Backend) -> None:
        if backend.rank == 0:
            backend.close()
            backend.close()
            with pytest.raises(ShutDownError):
                backend.barrier()
        else:
            error = reduce_until_error(backend, 8, 20)
            assert isinstance(error, PeerLostError)
            assert (error.ranks, error.hosts) == lost
            assert said in str(error)

    with_backends(join, 2, body, SOON)


def work_in_a_process(join: Join, member: Member) -> str:
    """All that needs real processes but no death, because starting them takes longest."""
    backend = _join(join, member, "matrix")
    run_matrix(backend, member.rank, member.size)
    member.meet_others("matrix-done")  # a member that closes earlier ends the operations of others
    backend.close()
    backend = _join(join, member, "abort")
    member.meet_others("connected")
    if member.rank == 0:
        abort_from_thread(backend, np.ones(1_000_000, np.float32))
    else:
        assert isinstance(reduce_until_error(backend, 1_000_000, 20), PeerLostError)
    backend.close()
    return "done"


def reduce_in_a_process(join: Join, member: Member) -> str:
    """Reduces until a member is lost; the name of the error."""
    backend = _join(join, member, "group")
    backend.barrier()
    member.tell("reducing")
    error = reduce_until_error(backend, 1_000_000, 60)
    backend.close()
    return type(error).__name__


def _join(join: Join, member: Member, name: str) -> Backend:
    return connect(join, group_of(member.size, member.rank), PrefixStore(member.store, name))
