"""The connections that come to a listening socket: how many, for how long, and without a loss at its end."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import select
import socket
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from collectives.net import descriptors
from collectives.net.interfaces import BACKLOG
from collectives.net.strangers import MOST, PAUSE, RareWarnings, Strangers

logger = logging.getLogger(__name__)


class Acceptor:
    """Accepts the connections of ``listener`` while its block runs; ``protocol`` makes the protocol of each.

    A connection is a stranger's until :meth:`authenticated` is called with its transport. Strangers are limited, in
    number by ``most`` and in time: see :mod:`collectives.net.strangers`. ``name`` is that of the server in the
    log, which gets one warning a minute.

    Owns ``listener``. Leaving the block closes it, and waits until each accepted connection has its protocol, which
    takes a few passes of the loop. asyncio's own server does not wait: where it closes between the accept and the
    protocol of a connection, nobody closes that connection.
    """

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], name: str, most: int = MOST
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._protocol = protocol
        self._name = name
        self._strangers = Strangers(most=most)
        self._transports: dict[int, asyncio.Transport] = {}
        # Owned by the acceptor, by descriptor. Bound: a few passes of the loop. close() waits for them.
        self._connecting: dict[int, asyncio.Task[Any]] = {}
        # Owned by the acceptor. Bound: next_look() of the strangers. Abort: the end of the block cancels it.
        self._timer: asyncio.TimerHandle | None = None
        self._is_accepting = False
        self._is_closed = False
        self._warnings = RareWarnings(logger)

    async def __aenter__(self) -> Acceptor:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to accept connections; the same as entering the block."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._update()

    async def close(self) -> None:
        """The same as leaving the block."""
        self._is_closed = True
        self._update()
        self._listener.close()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)

    def warn(self, text: str, *values: object) -> None:
        """Log a warning that strangers can cause, unless there was one in the last minute."""
        self._warnings.warn(text, *values)

    def authenticated(self, transport: asyncio.BaseTransport | None) -> None:
        """The other end of ``transport`` knows the secret: its connection is not limited any more."""
        sock = None if transport is None else transport.get_extra_info("socket")
        if sock is not None and sock.fileno() in self._strangers:
            self._forget(sock.fileno())
            if not self._is_accepting:
                self._update()

    def _update(self) -> None:
        """Accept connections while there is room; else make room, now or soon."""
        now = self._loop.time()
        if not self._is_closed:
            self._make_room(now)
        may_accept = not self._is_closed and self._strangers.may_accept(now)
        if may_accept != self._is_accepting:
            change = self._loop.add_reader if may_accept else self._loop.remove_reader
            change(self._listener, *([self._accept] if may_accept else []))
            self._is_accepting = may_accept
        self._look_again(now)

    def _look_again(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        when = math.inf if self._is_closed else self._strangers.next_look(now)
        # Those that are in the way, but have said something that was not read yet, stay a while.
        least = now + (0.0 if self._is_accepting else PAUSE / 2)
        self._timer = None if when == math.inf else self._loop.call_at(max(when, least), self._update)

    def _make_room(self, now: float) -> None:
        for descriptor, transport in list(self._transports.items()):
            if transport.is_closing():
                self._forget(descriptor)
        for descriptor in self._strangers.overdue(now):
            self._drop(descriptor)
        silent = [each for each in self._strangers.in_the_way(now) if not _has_unread(each)]
        if silent and self._strangers.is_full:
            text = (
                "%s: %d connections have not shown that they know the secret, and silent ones are closed to make room; "
            )
            advice = "if workers are among them, raise the limit of ulimit -n"
            self.warn(text + advice, self._name, len(self._strangers))
        for descriptor in silent:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        transport = self._transports.get(descriptor)
        if transport is not None:
            transport.abort()
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._strangers.discard(descriptor)
        self._transports.pop(descriptor, None)

    def _accept(self) -> None:
        """Accept one connection: in a burst, those accepted before authenticate in the meantime."""
        try:
            sock = self._strangers.next_from(self._listener, self._loop.time())
        except OSError as error:
            reason = descriptors.EXHAUSTED if descriptors.are_exhausted(error) else "the listening socket refuses"
            self.warn("%s cannot accept a connection: %s (%s)", self._name, reason, error)
            self._update()
            return
        if sock is None:
            return
        self._transports.pop(sock.fileno(), None)  # that of a connection that has ended
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, sock))
        self._connecting[sock.fileno()] = task
        task.add_done_callback(functools.partial(self._connected, sock.fileno()))
        if self._strangers.is_full:
            self._update()
        elif self._timer is None:
            self._look_again(self._loop.time())

    def _connected(self, descriptor: int, task: asyncio.Task[Any]) -> None:
        has_failed = task.cancelled() or task.exception() is not None
        if self._connecting.get(descriptor) is not task:
            return  # this connection has ended already, and its descriptor is that of a later one
        del self._connecting[descriptor]
        if has_failed or task.result()[0].is_closing():
            self._forget(descriptor)
        elif descriptor in self._strangers:
            self._transports[descriptor] = task.result()[0]


def _has_unread(descriptor: int) -> bool:
    """Whether bytes have come that the loop has not read yet, because it has much to do."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


def streams(
    attend: Callable[[StreamReader, StreamWriter], Coroutine[Any, Any, None]],
) -> Callable[[], asyncio.BaseProtocol]:
    """Makes protocols for an acceptor: each runs ``attend`` in a task, with the two ends of its connection."""
    return lambda: StreamReaderProtocol(StreamReader(), attend)
