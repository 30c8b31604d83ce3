"""How the members of a group exchange their offers in tests: through a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgpack

from collectives.api import CollectiveTimeoutError, Store
from collectives.backends.base import Backend, Bootstrap, Group
from collectives.net.attempts import ConnectAttempt
from tests.collectives.backends.members import in_threads

__all__ = ["exchange_offers", "meet", "with_backends"]

SLICE_SECONDS = 0.2


def meet(bootstrap: Bootstrap, store: Store, timeout: float) -> Backend:
    """The backend of ``bootstrap``, whose members exchange their offers through ``store`` within ``timeout``
    seconds."""
    with ConnectAttempt(timeout) as attempt:
        try:
            return bootstrap.connect(exchange_offers(bootstrap.group, bootstrap.offer, store, attempt), attempt)
        finally:
            bootstrap.close()


def with_backends(size: int, connect: Callable[[int], Any], body: Callable[[Any], object]) -> None:
    """``body(backend)`` on each member of a group of threads, once ``connect(rank)`` has returned on all of them.

    All backends are closed in the end, as ranks do: a member that closes its connections ends the operations of others,
    and their start.
    """

    def member(rank: int) -> None:
        try:
            backend = connect(rank)
            stack.callback(backend.close)
            connected.wait(20)
        except BaseException:
            connected.abort()
            raise
        try:
            body(backend)
        except BaseException:
            backend.close()
            raise

    connected = threading.Barrier(size)
    with ExitStack() as stack:
        in_threads(size, member)


def exchange_offers(group: Group, offer: bytes, store: Store, attempt: ConnectAttempt) -> list[bytes]:
    """The offers of all members, by position, through a ``store`` that no other group uses.

    The first member collects them, so that a group of P costs the store 3 P requests, not P * P.
    """
    if group.size == 1:
        return [offer]
    if group.position:
        store.set(str(group.position), offer)
        offers: list[bytes] = msgpack.unpackb(_read(store, "all", group, 0, attempt))
        return offers
    offers = [offer, *(_read(store, str(position), group, position, attempt) for position in group.others)]
    store.set("all", msgpack.packb(offers))
    return offers


def _read(store: Store, key: str, group: Group, position: int, attempt: ConnectAttempt) -> bytes:
    """The value of ``key``, which the member at ``position`` sets; looks at ``attempt`` now and then."""
    while True:
        attempt.check()
        try:
            return store.get(key, min(SLICE_SECONDS, attempt.remaining))
        except CollectiveTimeoutError as error:
            if not attempt.remaining:
                raise CollectiveTimeoutError(
                    f"{group.describe([position])} did not come in time to connect; look at its output, or raise "
                    "HOROVOD_GLOO_TIMEOUT_SECONDS",
                    [group.ranks[position]],
                ) from error
