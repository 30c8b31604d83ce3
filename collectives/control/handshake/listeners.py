"""Where a rank listens: an abstract Unix socket for its own host, and a TCP port for the others."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack
from typing import Any

from collectives.api import SettingsError
from collectives.control.handshake.dial import family_of
from collectives.control.handshake.hello import Hello

__all__ = ["Listeners"]


class Listeners:
    """Those of the rank of ``hello``, whose host has ``address``. A context manager.

    ``entry`` is the description by which the other ranks find them; ``backlog`` is for each. Without ``within_host``
    there is the TCP port only.
    """

    def __init__(self, hello: Hello, address: str, backlog: int, within_host: bool = True) -> None:
        self.entry: dict[str, Any] = {}
        self._hello = hello
        self._address = address
        self._backlog = backlog
        self._within_host = within_host
        self._by_descriptor: dict[int, socket.socket] = {}

    def __enter__(self) -> Listeners:
        name = f"\0hvd-cluster-{secrets.token_hex(16)}"
        with ExitStack() as stack:
            remote = stack.enter_context(self._listen(family_of(self._address), (self._address, 0)))
            listeners = [remote]
            if self._within_host:
                listeners.append(stack.enter_context(self._listen(socket.AF_UNIX, name)))
            stack.pop_all()
        self._by_descriptor = {listener.fileno(): listener for listener in listeners}
        self.entry = {
            "id": secrets.token_hex(8),
            "host": self._hello.host if self._within_host else "",
            "unix": name,
            "tcp": remote.getsockname(),
        }
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._by_descriptor.values():
            listener.close()

    @property
    def descriptors(self) -> list[int]:
        """Their descriptors."""
        return list(self._by_descriptor)

    def accept(self, descriptor: int) -> socket.socket | None:
        """The next connection to one of them, None if there is none. Raises OSError."""
        try:
            sock, _ = self._by_descriptor[descriptor].accept()
        except BlockingIOError:
            return None
        sock.setblocking(False)
        return sock

    def _listen(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(self._backlog)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise SettingsError(
                f"rank {self._hello.rank} cannot listen on {address!r}: {error}; HOROVOD_GLOO_IFACE can name "
                "another interface"
            ) from error
        return listener
