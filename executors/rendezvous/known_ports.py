"""The server of rank 0 has one of a few ports, which every rank derives from the name of the job."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from collectives.api import CollectiveTimeoutError, HorovodInternalError, SettingsError
from collectives.interfaces import LOOPBACK
from collectives.rendezvous.client import RendezvousClient
from collectives.rendezvous.server import RendezvousServer, everywhere
from collectives.retries import attempts
from executors.api import JobSecret
from executors.rendezvous.addresses import addresses_of
from executors.rendezvous.base import Found, Led
from executors.rendezvous.keys import SECRET, chosen_key, user_key

__all__ = ["GREETING", "KnownPorts", "Trust", "find", "ports_of"]

logger = logging.getLogger(__name__)

PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
# Below the ports that Linux gives to clients.
PORTS = range(20_000, 32_000)
CANDIDATES = 8
DIAL_SECONDS = 2.0
ANSWER_SECONDS = 5.0
GREETING = "job"


class Trust(Enum):
    """The origin of the job's secret, if the user has not set HOROVOD_SECRET_KEY."""

    USER = "a key file in the home directory, which all hosts share"
    NETWORK = "the name of the job, which everybody who reaches the ports can know"


@dataclass(frozen=True, slots=True)
class KnownPorts:
    """Rank 0 is on one of ``hosts``, and listens on one of ``ports``."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    trust: Trust

    @classmethod
    def on_this_host(cls, ports: tuple[int, ...]) -> KnownPorts:
        """All ranks are on one host."""
        return cls((LOOPBACK,), ports, Trust.USER)

    def lead(self, job: str, seconds: float) -> Led:
        """See :class:`.Rendezvous`. Listens on the first port that is free."""
        secret = self._secret(job)
        if self.trust is Trust.NETWORK and not chosen_key():
            logger.warning(
                "every process that can reach this host's ports can join this job; to prevent that, set %s to the same "
                "secret text for all ranks",
                SECRET,
            )
        server = _serve(secret, LOOPBACK if self.hosts == (LOOPBACK,) else everywhere(), self.ports)
        server.store.set(GREETING, job.encode())
        return Led(server, secret)

    def follow(self, job: str, seconds: float) -> Found:
        """See :class:`.Rendezvous`."""
        return find(self.hosts, self.ports, self._secret(job), job, seconds)

    def _secret(self, job: str) -> JobSecret:
        key = chosen_key() or (user_key() if self.trust is Trust.USER else b"")
        return JobSecret(hashlib.sha256(b"hvd-cluster job\0" + key + b"\0" + job.encode()).digest())


def ports_of(environment: Mapping[str, str], job: str) -> tuple[int, ...]:
    """The port that the user has set, or else some that are derived from ``job``. Raises SettingsError."""
    chosen = environment.get(PORT, "").strip()
    if not chosen:
        digest = hashlib.sha256(job.encode()).digest()
        numbers = [int.from_bytes(digest[2 * index : 2 * index + 2], "big") for index in range(CANDIDATES)]
        return tuple(dict.fromkeys(PORTS[number % len(PORTS)] for number in numbers))
    if not chosen.isascii() or not chosen.isdigit() or not 0 < int(chosen) < 65536:
        raise SettingsError(f"{PORT} is {chosen!r}, but must be a port number, 1 to 65535")
    return (int(chosen),)


def _serve(secret: JobSecret, host: str, ports: Sequence[int]) -> RendezvousServer:
    problem: SettingsError | None = None
    for port in ports:
        server = RendezvousServer(secret.key, host, port)
        try:
            server.start()
        except SettingsError as error:
            problem = error
        else:
            return server
    shown = ", ".join(map(str, ports))
    raise SettingsError(f"rank 0 cannot listen on any of the ports {shown}; set {PORT} to a free one") from problem


def find(hosts: Sequence[str], ports: Sequence[int], secret: JobSecret, job: str, seconds: float) -> Found:
    """The server of ``job`` at one of ``ports`` of one of ``hosts``.

    Raises CollectiveTimeoutError if none answers within ``seconds``, with the last answer of each server that refused.
    """
    refusals: dict[str, str] = {}
    for _ in attempts(seconds):
        for host in hosts:
            for address in addresses_of(host):
                for port in ports:
                    if _answers(address, port, secret, job, refusals):
                        return Found(address, port, secret)
    told = "".join(f"; {text}" for text in refusals.values())
    raise CollectiveTimeoutError(
        f"rank 0 was not found within {seconds:g} s on {' or '.join(hosts)}, port {', '.join(map(str, ports))}{told}. "
        "Look at the log of rank 0, or raise HOROVOD_START_TIMEOUT; where only some ranks ask for MPI, as by "
        "HOROVOD_CPU_OPERATIONS=mpi, let all ask for it"
    )


def _answers(address: str, port: int, secret: JobSecret, job: str, refusals: dict[str, str]) -> bool:
    try:
        socket.create_connection((address, port), timeout=DIAL_SECONDS).close()
        with RendezvousClient(address, port, secret.key, ANSWER_SECONDS) as client:
            return client.get(GREETING, 0.0) == job.encode()
    except SettingsError:  # another server, or one with another secret
        refusals[f"{address}:{port}"] = (
            f"a server at {address} port {port} does not belong to this job, or has another secret: if the "
            f"hosts do not share the home directory, set {SECRET} to the same text for all ranks"
        )
    except (OSError, HorovodInternalError):
        pass
    return False
