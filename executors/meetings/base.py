"""What every way of meeting does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from collectives.rendezvous.server import RendezvousServer
from executors.api import JobSecret

__all__ = ["Found", "Led", "Meeting", "nothing"]


def nothing() -> None:
    """Nothing is to be ended."""


@dataclass(frozen=True, slots=True)
class Led:
    """The rendezvous server of the job, which runs in this process. ``close`` ends what the meeting has opened."""

    server: RendezvousServer
    secret: JobSecret
    close: Callable[[], None] = nothing


@dataclass(frozen=True, slots=True)
class Found:
    """The rendezvous server of the job, as this process reaches it. ``close`` ends what the meeting has opened."""

    address: str
    port: int
    secret: JobSecret
    close: Callable[[], None] = nothing


class Meeting(Protocol):
    """A way on which ranks find rank 0; a value without connections."""

    def lead(self, job: str) -> Led:
        """In rank 0: start the server. Raises SettingsError where that is not possible."""

    def follow(self, job: str, seconds: float) -> Found:
        """In any other rank: find the server within ``seconds``; SettingsError, or CollectiveTimeoutError then."""
