"""torchrun, and all launchers that set its variables: Azure ML, Kubeflow's PyTorchJob, a Job of Kubernetes; and groups
of torch.distributed, whose ranks have a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from collectives import CollectiveTimeoutError, SettingsError, attempts
from executors.launchers.known_ports import KnownPorts, RendezvousOffer, Trust, find, ports_of, serve
from executors.launchers.place import Found, Led, Place, number, text
from executors.launchers.shared_folder import FOLDER

REMEDY = f"set MASTER_ADDR to the host of rank 0, or {FOLDER} to a folder that all hosts share"
LAUNCHER = "a launcher for torch.distributed"


class TorchDistributed:
    """RANK, WORLD_SIZE and MASTER_ADDR; torchrun adds the place on the host.

    Rank 0 does not listen on MASTER_PORT, which torch.distributed needs, but on a port that is derived from it.
    """

    def place(self, environment: Mapping[str, str]) -> Place | None:
        rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
        master = text(environment, "MASTER_ADDR")
        if rank is None or size is None or not text(environment, "MASTER_ADDR", "LOCAL_RANK", FOLDER):
            return None
        # Not TORCHELASTIC_RESTART_COUNT: each agent counts the failures of its own ranks. A new start has the name of
        # the one before, whose ranks have ended: every agent ends its own before it asks the others for a new start.
        names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        job = " ".join(["torch", *(text(environment, name) for name in names)])
        is_one_host = number(environment, "LOCAL_WORLD_SIZE") == size
        return Place(
            launcher="torchrun" if text(environment, "LOCAL_RANK") else LAUNCHER,
            variable="WORLD_SIZE",
            rank=rank,
            size=size,
            job=job,
            rendezvous=self._rendezvous(environment, master, job, is_one_host),
            node=_node(environment),
            remedy=REMEDY,
        )

    def _rendezvous(
        self, environment: Mapping[str, str], master: str, job: str, is_one_host: bool
    ) -> KnownPorts | None:
        ports = ports_of(environment, job)
        if is_one_host:
            return KnownPorts.on_this_host(ports)
        # A home directory that all hosts share is rare among the users of these launchers.
        return KnownPorts((master,), ports, Trust.NETWORK) if master else None


class WithoutAddress:
    """RANK and WORLD_SIZE alone: one of several processes, which would otherwise train a model of its own.

    Scripts for srun set both, too, and leave the address to srun.
    """

    def place(self, environment: Mapping[str, str]) -> Place | None:
        rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
        if rank is None or size is None:
            return None
        return Place(LAUNCHER, "WORLD_SIZE", rank, size, job="torch", rendezvous=None, remedy=REMEDY)


def _node(environment: Mapping[str, str]) -> str:
    """torchrun may run several groups of ranks, each with its own local ranks, on one machine."""
    group = text(environment, "GROUP_RANK")
    return f"group {group}" if group else ""


OFFER = "hvd-cluster"
"""The key of rank 0's address in the store of a group."""


@dataclass(frozen=True, slots=True)
class StoreRendezvous:
    """Rank 0 leaves its address in ``store``, a Store of torch.distributed that all ranks of a group have."""

    store: Any

    def lead(self, job: str, seconds: float) -> Led:
        """The address goes when all have come: the store may outlive the group, and have the next one of that name."""
        server, offer = serve(job)
        try:
            self.store.set(OFFER, offer.pack())
        except Exception as error:
            server.stop()
            raise SettingsError(f"the store of torch.distributed cannot be written: {error}") from error
        return Led(server, offer.secret, end=self._forget)

    def _forget(self) -> None:
        with suppress(RuntimeError):  # some stores cannot delete, and the next rank 0 writes over it
            self.store.delete_key(OFFER)

    def follow(self, job: str, seconds: float) -> Found:
        """An earlier rank 0 may have left an address, so it is read again until it is true."""
        reason: Exception | None = None
        for left in attempts(seconds):
            try:
                self.store.wait([OFFER], timedelta(seconds=max(left, 0.1)))
                offer = RendezvousOffer.unpack(self.store.get(OFFER))
                return find(offer.addresses, [offer.port], offer.secret, job, 0.0)
            except (RuntimeError, SettingsError, CollectiveTimeoutError) as error:
                reason = error
        raise CollectiveTimeoutError(
            f"rank 0 of group {job!r} was not found by the store of torch.distributed within {seconds:g} s. Look at "
            "its log: it must call init_process_group() or new_group(), too"
        ) from reason
