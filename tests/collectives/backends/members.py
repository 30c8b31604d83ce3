"""Run the members of a group together: as threads of this process, or as processes that share a rendezvous server."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from collectives.api import Store
from collectives.backends.base import Group
from collectives.store.client import RendezvousClient
from collectives.store.server import RendezvousServer

__all__ = ["Member", "Processes", "forking_context", "group_of", "in_threads"]

# The last one is not on every machine.
PRELOADED = [
    *("numpy", "pytest", "hypothesis", "collectives.store.server", "collectives.engine.start"),
    *("torch", "torch._dynamo.config", "hvd_cluster.torch"),  # with the compiler: see tests.startup
]


def group_of(size: int, position: int = 0, hosts: str = "") -> Group:
    """As the member at ``position`` sees it. Each letter of ``hosts`` is the host of a member, by default one host."""
    return Group(tuple(range(size)), position, tuple(hosts or "a" * size))


def in_threads(size: int, body: Callable[[int], Any], timeout: float = 100.0) -> list[Any]:
    """``body(rank)`` in one thread for each rank; what they return. Raises the first error of the lowest rank."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    threads = [threading.Thread(target=_keep, args=(body, rank, results, errors), daemon=True) for rank in range(size)]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    for rank in sorted(errors):
        raise errors[rank]
    assert not any(thread.is_alive() for thread in threads), f"only ranks {sorted(results)} of {size} came back"
    return [results[rank] for rank in range(size)]


def _keep(body: Callable[[int], Any], rank: int, results: dict[int, Any], errors: dict[int, BaseException]) -> None:
    try:
        results[rank] = body(rank)
    except BaseException as error:  # noqa: BLE001
        errors[rank] = error


def preload(*modules: str) -> None:
    """Let the server of :func:`forking_context` import ``modules``, too; before it has started."""
    PRELOADED.extend(modules)


def forking_context() -> ForkServerContext:
    """Processes are forked from a server that has imported the large libraries, and has no threads.

    They have the variables of the server, which are those of the first test that uses it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.freeze"])
    return context


class Member:
    """The arguments of a body in its process: its position, the store of the job, and a connection to the test."""

    def __init__(self, rank: int, size: int, store: Store, line: Connection) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.tell: Callable[[object], None] = line.send

    def meet_others(self, place: str) -> None:
        """Return when all members have come to ``place``, which each of them does once."""
        self.store.set(f"{place}/{self.rank}", b"here")
        for rank in range(self.size):
            self.store.get(f"{place}/{rank}", 60.0)


class Processes:
    """``body(member)`` in one fresh process for each rank; those that are left are killed at the end.

    ``body`` is a function of a module that the new process can import.
    """

    def __init__(self, size: int, body: Callable[[Member], Any]) -> None:
        secret = secrets.token_bytes(16)
        self._server = RendezvousServer(secret)
        context = forking_context()
        self._lines, theirs = zip(*(context.Pipe(duplex=False) for _ in range(size)), strict=True)
        port = self._server.start()
        self._processes = [
            context.Process(target=_run, args=(body, rank, size, secret, port, line, dict(os.environ)), daemon=True)
            for rank, line in enumerate(theirs)
        ]
        for process, line in zip(self._processes, theirs, strict=True):
            process.start()
            line.close()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process, line in zip(self._processes, self._lines, strict=True):
            process.kill()
            process.join(10)
            process.close()
            line.close()
        self._server.stop()

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        os.kill(self._processes[rank].pid, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """SIGSTOP."""
        os.kill(self._processes[rank].pid, signal.SIGSTOP)

    def hear(self, rank: int, timeout: float = 100.0) -> Any:
        """The next thing that ``rank`` tells; the last is what its body returned. Raises what the body raised."""
        assert self._lines[rank].poll(timeout), f"rank {rank} said nothing for {timeout} s"
        word = self._lines[rank].recv()
        if isinstance(word, _Failure):
            raise AssertionError(f"rank {rank} failed:\n{word.text}")
        return word

    def results(self) -> list[Any]:
        """The results of the bodies."""
        return [self.hear(rank) for rank in range(len(self._lines))]


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _run(
    body: Callable[[Member], Any],
    rank: int,
    size: int,
    secret: bytes,
    port: int,
    line: Connection,
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    client = RendezvousClient("127.0.0.1", port, secret)
    try:
        line.send(body(Member(rank, size, client, line)))
    except BaseException:  # noqa: BLE001
        line.send(_Failure(traceback.format_exc()))
    finally:
        client.close()
