"""Pure: the place of this process in a job of a launcher that is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from executors.launchers.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True)
class Place:
    """This process is ``rank`` of the ``size`` processes that ``launcher`` has started.

    ``variable`` holds the size. ``job`` is a text that all ranks of the job have, and no other job at that time.
    ``node`` is the host as the launcher names it; empty: this machine's own identity. ``rendezvous`` is the way
    on which the ranks find rank 0; None where there is none, and then ``remedy`` says how to get one.
    """

    launcher: str
    variable: str
    rank: int
    size: int
    job: str
    rendezvous: Rendezvous | None
    node: str = ""
    remedy: str = ""


class Launcher(Protocol):
    """A launcher that is not ours."""

    def place(self, environment: Mapping[str, str]) -> Place | None:
        """The place of the process with ``environment``; None if this launcher did not start it."""


def text(environment: Mapping[str, str], *names: str) -> str:
    """The first of the variables ``names`` that is set; empty where none is."""
    return next((value for name in names if (value := environment.get(name, "").strip())), "")


def number(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables ``names`` that is set, if that is a number of at least 0."""
    value = text(environment, *names)
    return int(value) if value.isascii() and value.isdigit() else None
