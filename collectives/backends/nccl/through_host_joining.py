"""How the members of a group come to exchange tensors on GPUs by a backend of the host."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from collectives.attempt import ConnectAttempt
from collectives.backends.joining import Joining
from collectives.backends.nccl.device import Device
from collectives.backends.nccl.presence import device_at, without_gpu
from collectives.backends.nccl.through_host import ThroughHostBackend

__all__ = ["ThroughHostJoining"]


class ThroughHostJoining(Joining):
    """See :class:`Joining`; it owns ``inner``. See :class:`ThroughHostBackend` for ``settles_early``."""

    def __init__(self, inner: Joining, local_rank: int, settles_early: bool = True) -> None:
        super().__init__(inner.group, msgpack.packb((without_gpu(), inner.offer)))
        self._inner = inner
        self._local_rank = local_rank
        self._settles_early = settles_early

    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> ThroughHostBackend:
        """See :class:`Joining`."""
        reasons, of_inner = zip(*map(msgpack.unpackb, offers), strict=True)
        named = [f"{self.group.describe([position])}: {reason}" for position, reason in enumerate(reasons) if reason]
        absence = f"no GPU can be used on {named[0]}" if named else ""

        def place(address: int) -> Device:
            return device_at(address, self._local_rank)

        return ThroughHostBackend(self._inner.connect(of_inner, attempt), place, self._settles_early, absence)

    def close(self) -> None:
        """See :class:`Joining`."""
        self._inner.close()
