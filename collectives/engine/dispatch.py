"""Hands each message to its handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from collectives.api import EngineError
from collectives.planning.messages import Message

__all__ = ["Dispatch"]

Kind = TypeVar("Kind")


class Dispatch:
    """One handler for each class of messages."""

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def on(self, kind: type[Kind], handle: Callable[[Kind], None]) -> None:
        """Make ``handle`` the handler of all messages of ``kind``; EngineError if they have one already."""
        if kind in self._handlers:
            raise EngineError(f"messages of kind {kind.__name__} already go to {self._handlers[kind]!r}")
        self._handlers[kind] = handle

    def __call__(self, message: Message) -> None:
        """Call the handler; EngineError for a message that no rank expects from its coordinator."""
        handle = self._handlers.get(type(message))
        if handle is None:
            raise EngineError(f"{message!r} is not a message for this rank")
        handle(message)
