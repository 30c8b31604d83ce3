"""A piece of memory that the ranks of a process set share, if all of them are on one host."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.objects import allgather_object, broadcast_object

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32


class _Offer(NamedTuple):
    """Where the first member has its memory, which begins with ``token``; ``problem``: why there is none."""

    path: str = ""
    token: bytes = b""
    problem: str = ""


def shared_memory(nbytes: int, name: str, process_set: ProcessSet) -> tuple[npt.NDArray[np.uint8] | None, str]:
    """The same ``nbytes`` of zeros on all members; or None on all of them, with the reason.

    A collective called ``name``. The memory is freed with the last view of the last member; nothing outlives them.
    """
    ranks, hosts = process_set.ranks or [0], basics.engine().topology.hosts
    used = sorted({hosts[rank] for rank in ranks})
    if len(used) > 1:
        return None, f"the ranks are on the hosts {', '.join(used)}"
    descriptor, offer = -1, _Offer()
    is_first = process_set.rank() == 0
    if is_first:
        descriptor, offer = _create(nbytes)
    try:
        offer = broadcast_object(offer, min(ranks), f"{name}.offer", process_set)
        memory, problem = _attach(offer, nbytes)
        problems = allgather_object(problem, f"{name}.problem", process_set)
    finally:
        if is_first and descriptor >= 0:
            os.close(descriptor)
    found = [each for each in problems if each]
    if memory is None or found:
        return None, found[0]
    memory[:TOKEN_BYTES] = 0  # the same zeros from each member, before any of them goes on
    allgather_object(None, f"{name}.ready", process_set)
    return memory[:nbytes], ""


def _create(nbytes: int) -> tuple[int, _Offer]:
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        descriptor = os.memfd_create("hvd-cluster-parameters", os.MFD_CLOEXEC)
    except OSError as error:
        return -1, _Offer(problem=f"the memory cannot be created: {error}")
    try:
        os.posix_fallocate(descriptor, 0, nbytes + TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
    except OSError as error:
        os.close(descriptor)
        return -1, _Offer(problem=f"rank {basics.rank()} cannot get {nbytes} bytes of shared memory: {error}")
    return descriptor, _Offer(f"/proc/{os.getpid()}/fd/{descriptor}", token)


def _attach(offer: _Offer, nbytes: int) -> tuple[npt.NDArray[np.uint8] | None, str]:
    """In a container of its own the path leads to nothing, or to a file without the token."""
    if offer.problem:
        return None, offer.problem
    try:
        with open(offer.path, "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes + TOKEN_BYTES), np.uint8)
    except (OSError, ValueError) as error:
        return None, f"rank {basics.rank()} cannot open the memory of the first rank: {error}"
    if memory[:TOKEN_BYTES].tobytes() != offer.token:
        return None, f"the memory of the first rank is not at {offer.path} on rank {basics.rank()}, as in a container"
    return memory, ""
