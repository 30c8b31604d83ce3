"""How the members of a shared-memory group connect: they fetch the memory from the first of them."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.attempt import ConnectAttempt
from collectives.backends.group import Group
from collectives.backends.joining import Joining
from collectives.backends.shm.backend import ShmBackend, segment_bytes
from collectives.backends.shm.segment import SegmentSource, receive_segment

__all__ = ["ShmJoining"]


class ShmJoining(Joining):
    """See :class:`Joining`. ``timeout`` bounds the silence of a peer within an operation, in seconds.

    ``crowded``: the host has more ranks than cores, see :class:`collectives.cores.Cores`.
    """

    def __init__(self, group: Group, timeout: float, crowded: bool) -> None:
        self._crowded = crowded
        self._nbytes = segment_bytes(group.size)
        self._timeout = timeout
        self._source = None if group.position else SegmentSource(self._nbytes, group.size)
        super().__init__(group, self._source.address if self._source is not None else b"")

    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> ShmBackend:
        """See :class:`Joining`."""
        if self._source is not None:
            segment = self._source.hand_out(self.group, attempt)
        else:
            segment = receive_segment(offers[0], self._nbytes, self.group, attempt)
        return ShmBackend(self.group, segment, self._timeout, self._crowded)

    def close(self) -> None:
        """See :class:`Joining`."""
        if self._source is not None:
            self._source.close()
