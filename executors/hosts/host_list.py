"""Pure: the hosts that a user names -> the slots of each, in the order of the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["NAME", "check_names", "dash_problem", "parse_host_file", "parse_host_list", "slots_for"]

NAME = r"(?:\w[\w.-]*@)?\w[\w.-]*"
"""The pattern of a host name, which may have a user before it."""
HOST_AND_SLOTS = re.compile(rf"({NAME}):([1-9]\d{{0,5}})", re.ASCII)
LINE = re.compile(rf"({NAME})(?:\s+slots\s*=\s*|:)([1-9]\d{{0,5}})(?:\s.*)?", re.ASCII)
DASH = re.compile(r"-|[^@\s]*@-")
DASH_PROBLEM = "; a host name must not begin with '-': ssh would take it for an option"


def parse_host_list(text: str) -> dict[str, int]:
    """The slots of each host in ``text``, such as ``a:2,b:4``. Raises ValueError."""
    entries = [entry.strip() for entry in text.split(",")]
    return _unique(_parse(entry, HOST_AND_SLOTS, "host:slots") for entry in entries)


def parse_host_file(text: str) -> dict[str, int]:
    """The slots of each host in lines ``host slots=2`` or ``host:2`` of ``text``; ``#`` begins a comment.

    Raises ValueError for another line, for a host that is named twice, and for no host at all.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = _unique(_parse(line, LINE, "a line such as node1 slots=4") for line in lines if line)
    if not found:
        raise ValueError("it names no host; write a line such as node1 slots=4 for each")
    return found


def dash_problem(entry: str) -> str:
    """The end of an error about ``entry``, if its host name begins with a dash; else nothing."""
    return DASH_PROBLEM if DASH.match(entry) else ""


def check_names(hosts: Iterable[str]) -> None:
    """Raise ValueError for a host name that ssh would take for an option, such as one of a batch system."""
    for name in hosts:
        if dash_problem(name):
            raise ValueError(f"{name!r} is not the name of a host{DASH_PROBLEM}")


def slots_for(size: int, hosts: Mapping[str, int]) -> dict[str, int]:
    """The slots of ``hosts`` that ``size`` ranks take, from the first one on. Raises ValueError if there are fewer."""
    total = sum(hosts.values())
    if total < size:
        text = ", ".join(f"{name}:{count}" for name, count in hosts.items())
        advice = "start fewer, or name hosts with more slots (-H, hosts)"
        raise ValueError(f"{size} processes need {size} slots, but the hosts have {total} ({text}); {advice}")
    taken: dict[str, int] = {}
    for name, count in hosts.items():
        taken[name] = min(count, size - sum(taken.values()))
    return {name: count for name, count in taken.items() if count}


def _parse(entry: str, pattern: re.Pattern[str], allowed: str) -> tuple[str, int]:
    match = pattern.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not {allowed}{dash_problem(entry)}")
    return match[1], int(match[2])


def _unique(entries: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in entries:
        if name in found:
            raise ValueError(f"host {name!r} is named twice; name each host once, with all of its slots")
        found[name] = count
    return found
