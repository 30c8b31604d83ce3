"""The messages that the coordinator has to send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from collectives.planning.agreement import Disagreement
from collectives.planning.messages import Message, Refuse

__all__ = ["Outbox", "Outgoing", "refusal"]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the ranks that must get it."""

    ranks: tuple[int, ...]
    message: Message


def refusal(key: tuple[int, str], why: Disagreement) -> Refuse:
    """The message that the tensor ``key`` does not run."""
    return Refuse(*key, why.text, why.property, why.values, why.tensor)


class Outbox:
    """Messages in the order in which they must be sent."""

    def __init__(self) -> None:
        self._outgoing: list[Outgoing] = []

    def send(self, ranks: Iterable[int], message: Message) -> None:
        """Append ``message`` for ``ranks``."""
        self._outgoing.append(Outgoing(tuple(ranks), message))

    def refuse(self, key: tuple[int, str], ranks: Iterable[int], why: Disagreement) -> None:
        """Tell ``ranks`` that the tensor ``key`` does not run."""
        self.send(ranks, refusal(key, why))

    def take(self) -> list[Outgoing]:
        """Remove and return all."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing
