"""The message of rank 0 to the other ranks: its addresses, its port, and the secret of the rendezvous."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

from collectives.api import SettingsError
from collectives.rendezvous.server import RendezvousServer, everywhere
from executors.api import JobSecret
from executors.rendezvous.addresses import own_addresses
from executors.rendezvous.known_ports import GREETING

__all__ = ["Offer", "serve"]

MOST_ADDRESSES = 16


@dataclass(frozen=True, slots=True)
class Offer:
    """The server of a rendezvous, at ``port`` of one of ``addresses``; it talks to processes that know ``secret``."""

    addresses: Sequence[str]
    port: int
    secret: JobSecret

    def pack(self) -> bytes:
        """As text without spaces, which every launcher carries."""
        key = base64.b64encode(self.secret.key).decode()
        value = {"addresses": self.addresses, "port": self.port, "key": key}
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """The offer in the result of :meth:`pack`. Raises SettingsError for anything else."""
        try:
            value = json.loads(data)
            return cls(list(value["addresses"]), int(value["port"]), JobSecret(base64.b64decode(value["key"])))
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"the address of rank 0 came as {len(data)} bytes that cannot be read ({error!r}); all ranks need the "
                "same version of hvd-cluster"
            ) from error


def serve(job: str) -> tuple[RendezvousServer, Offer]:
    """Start the server of the rendezvous of ``job`` with a random secret, at all addresses of this host."""
    secret = JobSecret()
    server = RendezvousServer(secret.key, everywhere())
    server.store.set(GREETING, job.encode())
    server.start()
    return server, Offer(own_addresses()[:MOST_ADDRESSES], server.port, secret)
