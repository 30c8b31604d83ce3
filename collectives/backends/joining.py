"""How the members of a group connect: each offers an address, and connects when it knows the offers of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from collectives.attempt import ConnectAttempt
from collectives.backends.base import Backend
from collectives.backends.group import Group

__all__ = ["Joining"]


class Joining(ABC):
    """One member that is about to connect to the others of ``group``.

    ``offer`` is the address for the others: bytes that only this class reads.
    """

    def __init__(self, group: Group, offer: bytes = b"") -> None:
        self.group = group
        self.offer = offer

    @abstractmethod
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> Backend:
        """The connected backend; ``offers`` are those of the members, by position. Call it once.

        Raises PeerLostError, CollectiveTimeoutError, and the error that ``attempt`` was aborted with.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the offered address, after :meth:`connect` or instead of it. Idempotent."""
