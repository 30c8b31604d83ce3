"""How the members of a group of pygloo connect: each offers the entry of its helper process for Gloo's store."""

from __future__ import annotations

import select
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from collectives.api import HorovodInternalError, override
from collectives.backends.base import Bootstrap, Group
from collectives.backends.gloo.library import cannot_listen, pack_offer, translate, unpack_offers
from collectives.backends.messaging import MessagingBackend
from collectives.backends.pygloo.process import Helper
from collectives.backends.pygloo.transport import PyglooTransport
from collectives.net import interfaces
from collectives.net.attempts import ConnectAttempt


def require_pygloo() -> None:
    """Raise ImportError with the remedy where pygloo is missing. Does not import it: only helper processes do."""
    if find_spec("pygloo") is None:
        raise ImportError(
            "the pygloo backend needs pygloo, which is published for Python 3.10 and older; install it there with: "
            "pip install 'hvd-cluster[pygloo]', or use another backend"
        )


def not_imported(reason: str) -> ImportError:
    """The error for a pygloo that is installed, but cannot be imported for this ``reason``."""
    return ImportError(
        f"pygloo is installed, but its import fails: {reason}; install it again with: pip install --force-reinstall "
        "pygloo, or use another backend"
    )


BINDING = "pygloo"
START_SECONDS = 30.0


class PyglooBootstrap(Bootstrap):
    """A :class:`Bootstrap`.

    ``timeout`` bounds the silence of a peer within an operation, in seconds. ``address`` is the IP address of this host
    that the peers connect to: anyone who reaches it can disturb or join the exchange. Raises ImportError without
    pygloo, SettingsError for an address that this host does not have.
    """

    def __init__(self, group: Group, timeout: float, address: str = interfaces.LOOPBACK) -> None:
        require_pygloo()
        super().__init__(group)
        self._timeout = timeout
        self._address = address
        self._helper: Helper | None = Helper()
        try:
            self._helper.tell("open", group.position, group.size, address)
            with ConnectAttempt(START_SECONDS) as attempt:
                self.offer = pack_offer(BINDING, *self._hear("entry", attempt))
        except BaseException:
            self.close()
            raise

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> MessagingBackend:
        assert self._helper is not None
        self._helper.tell("entries", [entry for (entry,) in unpack_offers(BINDING, offers, self.group)])
        self._hear("done", attempt)
        helper, self._helper = self._helper, None
        helper.watch_connections()
        return MessagingBackend(PyglooTransport(self.group, helper, self._timeout))

    @override
    def close(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _hear(self, expected: str, attempt: ConnectAttempt) -> list[Any]:
        """The rest of the next message of the helper process, which has to be ``expected``."""
        assert self._helper is not None
        if not attempt.wait({self._helper.fileno(): select.POLLIN}):
            raise self.group.late("did not connect to Gloo in time")
        try:
            kind, *rest = self._helper.hear()
        except (EOFError, OSError) as error:
            raise HorovodInternalError(f"the helper process of pygloo ended while it connected ({error})") from error
        if kind == expected:
            return rest
        if kind == "not imported":
            raise not_imported(rest[0])
        failure = RuntimeError(rest[0])
        is_listening = expected != "entry"
        raise (translate(failure, self.group) if is_listening else cannot_listen(failure, self._address)) from failure
