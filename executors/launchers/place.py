"""The place of this process in a job of a launcher that is not ours, and how its ranks find rank 0: the interfaces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from collectives import RendezvousServer
from executors.api import JobSecret


def nothing() -> None:
    """Nothing is to be ended."""


@dataclass(frozen=True, slots=True)
class Led:
    """The server of the rendezvous, which runs in this process.

    ``end`` removes what the other ranks have read, when all have come; ``close`` ends what else the rendezvous has
    opened, when the process ends.
    """

    server: RendezvousServer
    secret: JobSecret
    close: Callable[[], None] = nothing
    end: Callable[[], None] = nothing


@dataclass(frozen=True, slots=True)
class Found:
    """The server of the rendezvous, as this process reaches it. ``close`` ends what the rendezvous has opened."""

    address: str
    port: int
    secret: JobSecret
    close: Callable[[], None] = nothing


class Rendezvous(Protocol):
    """A way on which ranks find rank 0; a value without connections.

    Its server and its secret are for the rendezvous alone, because the secret may stay where others can read it.
    """

    def lead(self, job: str, seconds: float) -> Led:
        """In rank 0: start the server, and tell the others within ``seconds``.

        Raises SettingsError where that is not possible, CollectiveTimeoutError or PeerLostError if they do not come.
        """

    def follow(self, job: str, seconds: float) -> Found:
        """In any other rank: find the server within ``seconds``. Raises as :meth:`lead`."""


SECONDS = 300.0
"""The hosts of a job may start minutes apart."""


class Farewell:
    """The reason that this process still serves; none at first. It ends after SECONDS, or before the next one."""

    def __init__(self) -> None:
        self._close = self._disown = self._forget = nothing

    def hold(self, close: Callable[[], None], disown: Callable[[], None]) -> None:
        """Call ``close`` at the end; ``disown`` leaves it to the parent, in a forked child."""
        self._close, self._disown = close, disown
        # Owner: this object; bound: SECONDS; abort: end().
        timer = threading.Timer(SECONDS, self.end)
        timer.daemon = True
        timer.start()
        self._forget = timer.cancel

    def end(self) -> None:
        """Serve no longer. Any number of times, from any thread."""
        self._forget()
        close, self._close, self._disown = self._close, nothing, nothing
        close()

    def disown(self) -> None:
        """In a forked child: all of it is the parent's. Takes no lock."""
        disown, self._close, self._disown, self._forget = self._disown, nothing, nothing, nothing
        disown()


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
