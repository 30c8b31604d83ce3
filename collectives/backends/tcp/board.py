"""How the members of a TCP group decide by themselves whether to run an operation: by its own first messages."""

from __future__ import annotations

from collections.abc import Callable

from collectives.backends.tcp.ballot import Disagreement
from collectives.backends.tcp.transport import TcpTransport
from collectives.planning.board import Board

__all__ = ["TcpBoard"]


class TcpBoard(Board):
    """The first exchange of an operation carries the values. Before it, an operation writes to no destination."""

    def __init__(self, transport: TcpTransport) -> None:
        self._transport = transport
        self._ballot = transport.ballot

    def attempt(
        self,
        value: int,
        call: Callable[[], None],
        waiting: Callable[[list[int]], None],
        agreed: Callable[[], None],
    ) -> bool:
        """See :class:`Board`."""
        self._ballot.ask(value, waiting, agreed)
        try:
            call()
            self._transport.check()  # if the operation had nothing to exchange
        except Disagreement:
            return False
        finally:
            self._ballot.withdraw()
        return True

    def decline(self) -> None:
        """See :class:`Board`."""
        self._ballot.decline()

    def hurry(self) -> None:
        """See :class:`Board`."""
        self._ballot.flush()
