"""Collectives over MPI."""

from __future__ import annotations

from typing import Any

from collectives.backends.group import Group
from collectives.backends.messaging import MessagingBackend
from collectives.backends.mpi.transport import MpiTransport

__all__ = ["MpiBackend"]


class MpiBackend(MessagingBackend):
    """A member of ``group``, with the ``communicator`` of its members; ``timeout`` bounds an operation, in seconds.

    :class:`~collectives.backends.mpi.joining.MpiJoining` connects them.
    """

    def __init__(self, group: Group, communicator: Any, timeout: float) -> None:
        super().__init__(MpiTransport(group, communicator, timeout))
