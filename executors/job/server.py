"""A server of the driver: its socket, its thread with an asyncio loop, and its connections."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # on Python 3.10 this is not the builtin one
from typing import Any

from collectives import Acceptor, interfaces, streams
from executors.api import ExecutorError

START_SECONDS = 30.0

Started = Future[Callable[[], object]]
"""Gets the function that ends the server, from any thread, once the server runs."""


class ServerThread:
    """The daemon thread ``name``, which runs ``serve``. Its owner calls :meth:`start`, and :meth:`stop` once."""

    def __init__(self, name: str, serve: Callable[[socket.socket, Started], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._serve = serve
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None

    def start(self, listener: socket.socket) -> None:
        """Serve ``listener``, which the server closes. Raises ExecutorError."""
        started: Started = Future()
        thread = threading.Thread(target=self._run, args=(listener, started), name=self._name, daemon=True)
        try:
            thread.start()
            self._stop = started.result(START_SECONDS)
        except FutureTimeoutError:
            if not started.cancel() and started.exception() is None:
                started.result()()  # it has come up after all
            raise ExecutorError(f"the thread {self._name} did not start in {START_SECONDS:g} s") from None
        except (OSError, RuntimeError) as error:
            listener.close()
            raise ExecutorError(f"the thread {self._name} did not start ({error})") from error
        self._thread = thread

    def _run(self, listener: socket.socket, started: Started) -> None:
        serving = self._serve(listener, started)
        try:
            asyncio.run(serving)
        except Exception as error:
            serving.close()
            listener.close()
            if started.cancelled():
                return
            if started.done():
                raise
            started.set_exception(error)

    def stop(self, seconds: float) -> None:
        """End the server, and wait for that for ``seconds`` at most."""
        self._stop()
        if self._thread is not None:
            self._thread.join(seconds)


async def until_stopped(started: Started) -> None:
    """Give ``started`` the function that ends the server, and wait in its loop until the owner calls that."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    started.set_result(functools.partial(loop.call_soon_threadsafe, stop.set))
    await stop.wait()


def listen(address: str, whom: str, advice: str = "") -> socket.socket:
    """A socket that listens on ``address`` for ``whom``. Raises ExecutorError, whose text ends with ``advice``."""
    try:
        return interfaces.listen(address)
    except OSError as error:
        raise ExecutorError(f"the driver cannot listen on {address} for {whom} ({error}){advice}") from error


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
