"""The interface between the driver of a job and an executor: agents that start, watch and end workers on hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

__all__ = ["Agents"]


class Agents(Protocol):
    """Starts and ends workers, and runs the loop in which all calls to the driver are made.

    The agents report to the driver by its methods ``up``, ``done``, ``failed`` and ``host_lost``.
    """

    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        """Start ``worker`` on ``host`` with ``environment``, which has its place in the job."""

    def stop(self, worker: str) -> None:
        """Ask ``worker`` to end; it is killed if it does not."""

    def kill(self, worker: str) -> None:
        """End ``worker`` at once: it may be stopped, or hang."""

    def end(self, spare: str | None = None) -> None:
        """Ask all workers to end, and kill those that do not; ``spare`` is asked last."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` in the loop, ``seconds`` from now, unless the job is over before."""

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the loop; from any thread."""
