"""Hosts with their slots, and the ranks on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from executors import assign_ranks, parse_host_file, parse_host_list

__all__ = ["HostInfo", "SlotInfo", "get_host_assignments", "parse_host_files", "parse_hosts"]


@dataclass
class HostInfo:
    """A host with the number of its slots."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """The host in a text such as ``node1:4``. Raises ValueError for another text."""
        [host] = parse_hosts(host_string)
        return host


@dataclass
class SlotInfo:
    """The numbers of a rank; those that are not known are None."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int | None = None
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """The hosts in a text such as ``node1:4,node2:4``. Raises ValueError for another text."""
    return [HostInfo(name, slots) for name, slots in parse_host_list(hosts_string).items()]


def parse_host_files(filename: str) -> str:
    """The hosts of a file with lines such as ``node1 slots=4``, in the form that :func:`parse_hosts` reads.

    Raises OSError where the file cannot be read, ValueError for another line.
    """
    hosts = parse_host_file(Path(filename).read_text(encoding="utf-8"))
    return ",".join(f"{name}:{slots}" for name, slots in hosts.items())


def get_host_assignments(
    hosts: Iterable[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """A slot for each rank, by rank, on ``hosts`` in their order: all slots, or ``max_num_proc``.

    Raises ValueError for fewer than ``min_num_proc`` slots.
    """
    names = list(islice((host.hostname for host in hosts for _ in range(host.slots)), max_num_proc))
    if len(names) < min_num_proc:
        raise ValueError(f"{min_num_proc} processes need {min_num_proc} slots, but the hosts have {len(names)}")
    slots = sorted(assign_ranks(names), key=lambda slot: slot.rank)
    return [
        SlotInfo(
            slot.host,
            slot.rank,
            slot.local_rank,
            slot.cross_rank,
            slot.size,
            slot.local_size,
            slot.cross_size,
        )
        for slot in slots
    ]
