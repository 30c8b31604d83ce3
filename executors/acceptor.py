"""The connections that come to a listening socket, without a loss at its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from collectives import descriptors

__all__ = ["Acceptor", "streams"]

PAUSE_SECONDS = 1.0
"""How long nothing is accepted after an accept has failed, mostly for want of a descriptor."""

logger = logging.getLogger(__name__)


class Acceptor:
    """Accepts the connections of ``listener`` while its block runs; ``protocol`` makes the protocol of each.

    Owns ``listener``. Leaving the block closes it, and waits until each accepted connection has its protocol, which
    takes a few passes of the loop. asyncio's own server does not wait: where it closes between the accept and the
    protocol of a connection, nobody closes that connection.
    """

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._protocol = protocol
        self._connecting: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._listener.setblocking(False)
        self._resume()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        reason = descriptors.EXHAUSTED if descriptors.are_exhausted(error) else "the listening socket refuses"
        logger.warning("the driver cannot accept a connection: %s (%s)", reason, error)
        self._loop.remove_reader(self._listener)
        # Owned by the acceptor. Bound: PAUSE_SECONDS. Abort: the end of the block cancels it.
        self._retry = self._loop.call_later(PAUSE_SECONDS, self._resume)


def streams(
    attend: Callable[[StreamReader, StreamWriter], Coroutine[Any, Any, None]],
) -> Callable[[], asyncio.BaseProtocol]:
    """Makes protocols for an acceptor: each runs ``attend`` in a task, with the two ends of its connection."""
    return lambda: StreamReaderProtocol(StreamReader(), attend)
