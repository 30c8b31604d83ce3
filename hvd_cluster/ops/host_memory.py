"""A piece of memory that the ranks of a process set share: all of them on one host, or those of each host."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.objects import allgather_object

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32


class _Offer(NamedTuple):
    """Where the first member of a host has its memory, which begins with ``token``; ``problem``: why there is none."""

    path: str = ""
    token: bytes = b""
    problem: str = ""


class HostMapping(NamedTuple):
    """``memory`` that the members on this host share; this member ``is_first`` of them, or not.

    ``partners``: on each other host with as many members, the one with the same place, as its position in the set.
    """

    memory: npt.NDArray[np.uint8]
    is_first: bool
    partners: Sequence[int]


def shared_memory(
    nbytes: int, name: str, process_set: ProcessSet, each_host: bool = False
) -> tuple[HostMapping | None, str]:
    """The same ``nbytes`` of zeros on all members; or None on all of them, with the reason.

    A collective called ``name``. With ``each_host`` the members may be on several hosts, equally many on each, and
    those of one host share memory. It is freed with the last view of the last member there; nothing outlives them.
    """
    problem = _problem(members_by_host(process_set), each_host)
    return (None, problem) if problem else host_memory(nbytes, name, process_set)


def host_memory(nbytes: int, name: str, process_set: ProcessSet) -> tuple[HostMapping | None, str]:
    """As :func:`shared_memory` with ``each_host``, where ``nbytes`` and the number of members differ between hosts."""
    members, position = members_by_host(process_set), process_set.rank() or 0
    own = next(each for each in members.values() if position in each)
    index, is_first = own.index(position), own[0] == position
    descriptor, offer = _create(nbytes) if is_first else (-1, _Offer())
    try:
        offers = allgather_object(offer, f"{name}.offer", process_set)
        memory, problem = _attach(offers[own[0]], nbytes)
        problems = allgather_object(problem, f"{name}.problem", process_set)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    found = [each for each in problems if each]
    if memory is None or found:
        return None, found[0]
    memory[:TOKEN_BYTES] = 0  # the same zeros from each member, before any of them goes on
    allgather_object(None, f"{name}.ready", process_set)
    partners = sorted(each[index] for each in members.values() if each is not own and len(each) == len(own))
    return HostMapping(memory[:nbytes], is_first, partners), ""


def members_by_host(process_set: ProcessSet) -> dict[str, list[int]]:
    """By host, the positions of its members."""
    hosts, found = basics.engine().topology.hosts, defaultdict[str, list[int]](list)
    for position, rank in enumerate(process_set.ranks or [0]):
        found[hosts[rank]].append(position)
    return found


def _problem(members: Mapping[str, Sequence[int]], each_host: bool) -> str:
    """Why ``members``, by host, cannot share memory as they should."""
    counts = [f"{host}: {len(each)}" for host, each in sorted(members.items())]
    numbers = {len(each) for each in members.values()}
    if len(members) == 1 or (each_host and len(numbers) == 1 and numbers != {1}):
        return ""
    if each_host and numbers != {1}:
        return f"the hosts have different numbers of ranks: {', '.join(counts)}"
    return f"the ranks are on the hosts {', '.join(sorted(members))}"


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
