"""The listening side of a member that connects: it admits the members that prove that they know the secret."""

from __future__ import annotations

import select
import socket
from collections.abc import Collection
from contextlib import closing

from collectives.api import CollectiveTimeoutError
from collectives.backends.group import Group
from collectives.control.handshake.candidates import MOST_CANDIDATES, Candidates
from collectives.control.handshake.frames import Wire, seal
from collectives.control.handshake.hello import Hello, LocalEnd, pack_answer
from collectives.control.handshake.listeners import Listeners
from collectives.control.handshake.objections import objection

__all__ = ["Reception", "listeners_of"]


def listeners_of(hello: Hello, address: str) -> Listeners:
    """Those of a member with this ``hello`` at ``address``; strangers have room in the queue, too."""
    return Listeners(hello, address, hello.size + MOST_CANDIDATES, within_host=False)


class Reception:
    """Admits the members of ``group`` at the positions ``expected``, which call ``listeners``."""

    def __init__(self, end: LocalEnd, group: Group, listeners: Listeners, expected: Collection[int]) -> None:
        self._end = end
        self._group = group
        self._missing = {group.ranks[position]: position for position in expected}
        self._poller = select.poll()
        self._candidates = Candidates(end, listeners, self._poller, len(expected), self._admit)
        self.admitted: dict[int, socket.socket] = {}
        """The connections of the admitted members, by position; the caller owns them."""

    def admit_all(self) -> None:
        """Return when all have come. Raises CollectiveTimeoutError that names the missing ones."""
        with closing(self._candidates):
            while self._missing:
                self._candidates.make_room()
                ready = self._end.attempt.poll(self._poller, self._candidates.next_look())
                if self._end.attempt.is_over:
                    raise self._late()
                for descriptor in ready:
                    self._candidates.attend(descriptor)

    def _admit(self, sock: socket.socket, hello: Hello, nonce: bytes) -> None:
        refusal = objection(hello, self._end.hello, self._missing)
        try:
            Wire(sock, self._end.attempt).send(seal(self._end.secret, nonce, pack_answer(None, refusal)))
        except BaseException:
            sock.close()
            raise
        if refusal is None:
            self.admitted[self._missing.pop(hello.rank)] = sock
        else:
            sock.close()
            self._candidates.warn("a connection", f": {refusal}")

    def _late(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._group.describe(self._missing.values())} did not connect in time; look at their output, or raise "
            "HOROVOD_GLOO_TIMEOUT_SECONDS",
            list(self._missing),
        )
