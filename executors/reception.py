"""The connections of a server, each of which a coroutine of its own attends."""

from __future__ import annotations

import asyncio
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from typing import Any

from collectives.reception.acceptor import Acceptor, streams
from executors.listening import Started, until_stopped

__all__ = ["STOP_SECONDS", "Reception"]

STOP_SECONDS = 5.0
"""How long the coroutines may take to end."""


class Reception:
    """Calls ``attend`` for each connection to the server ``name``; closes the connection when it returns.

    ``attend`` must call :meth:`authenticated`; until then the connection is a stranger's, and limited. Owns the tasks,
    from a call of :meth:`serve` until this has returned.
    """

    def __init__(self, name: str, attend: Callable[[StreamReader, StreamWriter], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._attend = attend
        self._acceptor: Acceptor | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def authenticated(self, writer: StreamWriter) -> None:
        """The other end of the connection knows the secret."""
        if self._acceptor is not None:
            self._acceptor.authenticated(writer.transport)

    def warn(self, text: str, *values: object) -> None:
        """Log a warning that strangers can cause: one a minute."""
        if self._acceptor is not None:
            self._acceptor.warn(text, *values)

    async def serve(self, listener: socket.socket, started: Started) -> None:
        """Serve ``listener`` until the function that ``started`` gets is called; then cancel all."""
        async with Acceptor(listener, streams(self._accept), self._name) as self._acceptor:
            await until_stopped(started)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            await self._attend(reader, writer)
        except asyncio.CancelledError:
            return  # the end of the server
        finally:
            self._tasks.discard(task)
            writer.transport.abort()
