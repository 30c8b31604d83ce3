"""Rank 0 tells its address and the secret over a channel of the launcher: PMI, PMIx, or MPI itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

from collectives import SettingsError
from executors.launchers.known_ports import RendezvousOffer, find, serve
from executors.launchers.mpi import ADVICE, Mpi
from executors.launchers.place import Found, Led
from executors.launchers.pmi import Pmi
from executors.launchers.pmix import Pmix


class LauncherChannel(Protocol):
    """A connection of this process to its launcher, or to the other ranks."""

    def broadcast(self, value: bytes | None, seconds: float) -> bytes:
        """Every rank calls this once, rank 0 with a value and the others with None; returns the value of rank 0.

        Raises CollectiveTimeoutError if ranks do not come within ``seconds``, PeerLostError if the launcher ends, and
        SettingsError for an answer that cannot be used.
        """

    def close(self) -> None:
        """End the connection."""


class _ByChannel(ABC):
    """A rendezvous by the channel that :meth:`_open` returns."""

    __slots__ = ()

    def lead(self, job: str, seconds: float) -> Led:
        """The secret is a random one."""
        with ExitStack() as stack:
            channel = stack.enter_context(closing(self._open(seconds)))
            server, offer = serve(job)
            stack.callback(server.stop)
            channel.broadcast(offer.pack(), seconds)
            stack.pop_all()
        return Led(server, offer.secret, channel.close)

    def follow(self, job: str, seconds: float) -> Found:
        with ExitStack() as stack:
            channel = stack.enter_context(closing(self._open(seconds)))
            offer = RendezvousOffer.unpack(channel.broadcast(None, seconds))
            found = find(offer.addresses, [offer.port], offer.secret, job, seconds)
            stack.pop_all()
        return Found(found.address, found.port, offer.secret, channel.close)

    @abstractmethod
    def _open(self, seconds: float) -> LauncherChannel:
        """The channel, once this process has it; raises as :meth:`.Rendezvous.lead`."""


@dataclass(frozen=True, slots=True)
class ByBroadcast(_ByChannel):
    """The first of ``channels`` that this process has; the job has ``size`` ranks."""

    channels: tuple[str, ...]
    size: int

    def _open(self, seconds: float) -> LauncherChannel:
        for name in self.channels:
            channel = CHANNELS[name](self.size, seconds)
            if channel is not None:
                return channel
        raise SettingsError(
            "the ranks of this mpirun have no way to find one another: pip install mpi4py, built for this MPI, or "
            f"{ADVICE}"
        )


@dataclass(frozen=True, slots=True)
class ByMpi(_ByChannel):
    """MPI among the ranks ``members`` of MPI.COMM_WORLD; the first of them leads."""

    members: tuple[int, ...]

    def _open(self, seconds: float) -> LauncherChannel:
        return Mpi.among(self.members, seconds)


CHANNELS: dict[str, Callable[[int, float], LauncherChannel | None]] = {
    "mpi4py if in use": Mpi.open_if_in_use,
    "mpi4py": Mpi.open,
    "pmi": lambda size, seconds: Pmi.open(),
    "pmix": lambda size, seconds: Pmix.open(),
}
