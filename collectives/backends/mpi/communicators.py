"""Communicators of MPI: the ranks of one, and how to make one without a wait that nothing can end."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

from collectives.api import InvalidRequestError
from collectives.backends.mpi.library import bounded, loaded_mpi

Look = Callable[[float], None]
"""Called with the seconds waited so far, many times a second; it raises to end the wait."""

SPIN_SECONDS = 0.0005
"""Sleeping costs a small operation its speed, spinning costs the other threads their core."""
SHARE = 0.02
"""A pause is this part of the time waited so far."""
LONGEST_PAUSE = 0.001


def poll(is_over: Callable[[], bool], look: Look) -> None:
    """Call ``is_over``, which lets MPI work, until it returns True. ``look`` bounds and aborts the wait."""
    if is_over():
        return
    began = time.monotonic()
    while not is_over():
        waited = time.monotonic() - began
        look(waited)
        if waited < SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(waited * SHARE, LONGEST_PAUSE))


TAG = 31_999
"""On MPI.COMM_WORLD, beside the messages of the script. Every MPI has tags up to 32,767."""
KEY_BYTES = 16
CREATE_SECONDS = 60.0
"""For ranks that are all in the call."""


def is_communicator(value: object) -> bool:
    """Whether ``value`` is a communicator of mpi4py."""
    mpi = loaded_mpi()
    return mpi is not None and isinstance(value, mpi.Comm)


def ranks_of(mpi: Any, communicator: Any) -> tuple[int, ...]:
    """The ranks in MPI.COMM_WORLD of the members of ``communicator``, in its order; none of MPI.COMM_NULL.

    Raises InvalidRequestError for a communicator between two groups, or with processes of another MPI job.
    """
    if communicator == mpi.COMM_NULL:
        return ()
    if communicator.Is_inter():
        raise InvalidRequestError("the communicator connects two groups; merge them first: comm.Merge()")
    group = communicator.Get_group()
    ranks = group.Translate_ranks(list(range(group.Get_size())), mpi.COMM_WORLD.Get_group())
    if any(rank == mpi.UNDEFINED for rank in ranks):
        raise InvalidRequestError("the communicator has processes that are not in MPI.COMM_WORLD; let mpirun start all")
    return tuple(ranks)


def gather(mpi: Any, communicator: Any, data: bytes, look: Look) -> list[bytes]:
    """The ``data`` of all members of ``communicator``, in their order; all of them call this."""
    lengths = (ctypes.c_int * communicator.Get_size())()
    own = ctypes.c_int(len(data))
    poll(communicator.Iallgather([own, mpi.INT], [lengths, mpi.INT]).Test, look)
    whole = bytearray(sum(lengths))
    starts = [0, *accumulate(lengths)]
    request = communicator.Iallgatherv([data, mpi.BYTE], [whole, (list(lengths), starts[:-1]), mpi.BYTE])
    poll(request.Test, look)
    return [bytes(whole[start:end]) for start, end in pairwise(starts)]


def create(mpi: Any, members: Sequence[int], key: bytes, look: Look) -> Any:
    """A new communicator of the ranks ``members`` of MPI.COMM_WORLD, in this order; each of them calls this.

    ``key`` is as in :func:`assemble`. Other processes are not involved.
    """
    assemble(mpi, members, key, look)
    group = mpi.COMM_WORLD.Get_group().Incl(list(members))
    with bounded(CREATE_SECONDS):  # all members are here
        return mpi.COMM_WORLD.Create_group(group, TAG)


def assemble(mpi: Any, members: Sequence[int], key: bytes, look: Look) -> None:
    """Return when all ``members`` have called this with ``key``, KEY_BYTES that no earlier, failed attempt had.

    A dissemination barrier (Hensgen, Finkel, Manber 1988): log2 P steps.
    """
    size = len(members)
    here, distance = members.index(mpi.COMM_WORLD.Get_rank()), 1
    while distance < size:
        _swap_keys(mpi, members[(here + distance) % size], members[(here - distance) % size], key, look)
        distance *= 2


def _swap_keys(mpi: Any, target: int, source: int, key: bytes, look: Look) -> None:
    sent = mpi.COMM_WORLD.Isend([key, mpi.BYTE], target, TAG)
    received = b""
    while received != key:  # it may be of an attempt that has failed
        received = _received(mpi, source, look)
    poll(sent.Test, look)


def _received(mpi: Any, source: int, look: Look) -> bytes:
    word = bytearray(KEY_BYTES)
    request = mpi.COMM_WORLD.Irecv([word, mpi.BYTE], source, TAG)
    try:
        poll(request.Test, look)
    except BaseException:
        with suppress(mpi.Exception):  # a receive can be taken back at once
            request.Cancel()
            request.Wait()
        raise
    return bytes(word)
