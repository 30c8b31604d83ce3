"""The registration of a new process set on one rank, until its members have connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from collectives.api import Request
from collectives.engine.set_backends import SetBackends
from collectives.engine.work import Work

__all__ = ["Form", "Formation", "Registration"]


class Formation(Protocol):
    """This rank's part in the connecting of a new process set."""

    def prepare(self) -> bytes:
        """Open the addresses of this rank, and return them for the other members. Call it once."""

    def connect(self, offers: Sequence[bytes], check: Callable[[], None]) -> SetBackends:
        """The backends of the set; ``offers`` are those of its members. Call it once.

        ``check`` raises when the job has ended; it is called often.
        """

    def close(self) -> None:
        """Release the addresses, at any time. Idempotent."""


Form: TypeAlias = Callable[[Sequence[int]], Formation]
"""The members of a new process set -> the formation of this rank, which is one of them. It holds nothing yet."""


class Registration(Work):
    """The work that adds a process set; owns ``formation``, None as long as there is none, and on other ranks."""

    __slots__ = ("formation",)

    def __init__(self, request: Request) -> None:
        super().__init__(request, None, None)
        self.formation: Formation | None = None

    def finish(self) -> None:
        """See :class:`Work`."""
        super().finish()
        self.close()

    def fail(self, error: Exception) -> None:
        """See :class:`Work`."""
        super().fail(error)
        self.close()

    def close(self) -> None:
        """Release the addresses of this rank. Idempotent."""
        if self.formation is not None:
            self.formation.close()
