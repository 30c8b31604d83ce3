"""How the members of a group come to exchange tensors on GPUs by a backend of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgpack

from collectives.attempt import ConnectAttempt
from collectives.backends.group import Group
from collectives.backends.joining import Joining
from collectives.backends.nccl.device import Device
from collectives.backends.nccl.presence import device_at, without_gpu
from collectives.backends.nccl.through_host import ThroughHostBackend
from collectives.backends.single import SingleBackend

__all__ = ["ThroughHostJoining"]


class ThroughHostJoining(Joining):
    """See :class:`Joining`, and :class:`ThroughHostBackend` for ``settles_early``.

    ``prepare`` makes the joining of the backend of the host, which this one owns. A host without a GPU does not need
    it, and then nobody connects: a job on CPUs has no connections for GPUs.
    """

    def __init__(
        self, group: Group, prepare: Callable[[], Joining], local_rank: int, settles_early: bool = True
    ) -> None:
        reason = without_gpu()
        self._inner = None if reason else prepare()
        super().__init__(group, msgpack.packb((reason, b"" if self._inner is None else self._inner.offer)))
        self._local_rank = local_rank
        self._settles_early = settles_early

    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> ThroughHostBackend:
        """See :class:`Joining`."""
        reasons, of_inner = zip(*map(msgpack.unpackb, offers), strict=True)
        named = [f"{self.group.describe([position])}: {reason}" for position, reason in enumerate(reasons) if reason]

        def place(address: int) -> Device:
            return device_at(address, self._local_rank)

        if self._inner is None or named:  # an operation of it is refused before it begins
            return ThroughHostBackend(SingleBackend(self.group), place, absence=f"no GPU can be used on {named[0]}")
        return ThroughHostBackend(self._inner.connect(of_inner, attempt), place, self._settles_early)

    def close(self) -> None:
        """See :class:`Joining`."""
        if self._inner is not None:
            self._inner.close()
