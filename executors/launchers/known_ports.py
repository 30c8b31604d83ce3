"""The server of rank 0 has one of a few ports, which every rank derives from the name of the job."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from collectives import (
    LOOPBACK,
    CollectiveTimeoutError,
    HorovodInternalError,
    RendezvousClient,
    RendezvousServer,
    SettingsError,
    attempts,
    interfaces,
)
from executors.api import JobSecret
from executors.job import host
from executors.launchers.place import Found, Led

logger = logging.getLogger(__name__)


SCONTROL_SECONDS = 10.0
# For documentation, RFC 3849: no host has it, so the default route leads there.
FOREIGN_IPV6 = "2001:db8::1"


def addresses_of(name: str) -> list[str]:
    """The addresses of the host ``name``: by the resolver, or else as SLURM knows them; empty where it is unknown."""
    with suppress(OSError):
        return list(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        )
    address = _address_in_slurm(name)
    return [address] if address else []


def _address_in_slurm(node: str) -> str:
    program = shutil.which("scontrol")
    if program is None:
        return ""
    # Bound: SCONTROL_SECONDS; the program is killed then.
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "show", "node", node], capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False
        )
        found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
        return found.group(1) if found and found.group(1) != node else ""
    return ""


def own_addresses() -> list[str]:
    """The addresses at which other ranks may reach this host: of the default route first, 127.0.0.1 last."""
    found = []
    with suppress(SettingsError):
        found.append(host.reachable_address())
    with suppress(OSError):
        found.append(host.address_towards(FOREIGN_IPV6))
    for interface in interfaces.names():
        with suppress(SettingsError):
            found.append(interfaces.address_of(interface))
    return [*(address for address in dict.fromkeys(found) if address != LOOPBACK), LOOPBACK]


SECRET = "HOROVOD_SECRET_KEY"
KEY_BYTES = 32
FILE = Path(".config", "hvd-cluster", "key")


def chosen_key() -> bytes:
    """The text of HOROVOD_SECRET_KEY; empty where the user has not set it."""
    return os.environ.get(SECRET, "").strip().encode()


def user_key(folder: Path | None = None) -> bytes:
    """The key of this user, from a file in the home directory, which the first job makes.

    Raises SettingsError where there is no such file and none can be made, or where others may read it.
    """
    path = (folder or Path.home()) / FILE
    try:
        with suppress(FileExistsError):
            _make(path)
        mode, key = path.stat(), path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} cannot be made or read ({error}); {_instead()}") from error
    if mode.st_uid != os.geteuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise SettingsError(f"{path} belongs to another user, or others may read it; chmod 600 it, or {_instead()}")
    if len(key) < KEY_BYTES:
        raise SettingsError(f"{path} has {len(key)} bytes, but must have {KEY_BYTES}; remove it, or {_instead()}")
    return key


def _instead() -> str:
    return f"set {SECRET} to the same secret text for all ranks"


def _make(path: Path) -> None:
    """Ranks of all hosts may do this at once: the first whole file stays."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with drafted(path, secrets.token_bytes(KEY_BYTES)) as draft:
        os.link(draft, path)


@contextmanager
def drafted(path: Path, content: bytes) -> Iterator[Path]:
    """A new file beside ``path`` with ``content``, which only this user can read; removed unless the block moves it."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


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
        """Listens on the first port that is free."""
        secret = self._secret(job)
        if self.trust is Trust.NETWORK and not chosen_key():
            logger.warning(
                "every process that can reach this host's ports can join this job; to prevent that, set %s to the same "
                "secret text for all ranks",
                SECRET,
            )
        server = _serve(secret, LOOPBACK if self.hosts == (LOOPBACK,) else interfaces.everywhere(), self.ports)
        server.store.set(GREETING, job.encode())
        return Led(server, secret)

    def follow(self, job: str, seconds: float) -> Found:
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
        for name in hosts:
            for address in addresses_of(name):
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


MOST_ADDRESSES = 16


@dataclass(frozen=True, slots=True)
class RendezvousOffer:
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
    def unpack(cls, data: bytes) -> RendezvousOffer:
        """The offer in the result of :meth:`pack`. Raises SettingsError for anything else."""
        try:
            value = json.loads(data)
            return cls(list(value["addresses"]), int(value["port"]), JobSecret(base64.b64decode(value["key"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise SettingsError(
                f"the address of rank 0 came as {len(data)} bytes that cannot be read ({error!r}); all ranks need the "
                "same version of hvd-cluster"
            ) from error


def serve(job: str) -> tuple[RendezvousServer, RendezvousOffer]:
    """Start the server of the rendezvous of ``job`` with a random secret, at all addresses of this host."""
    secret = JobSecret()
    server = RendezvousServer(secret.key, interfaces.everywhere())
    server.store.set(GREETING, job.encode())
    server.start()
    return server, RendezvousOffer(own_addresses()[:MOST_ADDRESSES], server.port, secret)
