"""The identity of the host that this process runs on, and its address."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from collectives import LOOPBACK, SettingsError, interfaces

# Processes that share these share memory, loopback addresses and process ids.
NAMESPACES = ("ipc", "mnt", "net", "pid")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ANY_PORT = 9
# For documentation, RFC 5737: no host has it, so the default route leads there.
FOREIGN_ADDRESS = "192.0.2.1"
OWN_ADDRESSES = (LOOPBACK, "::1")


def identity() -> str:
    """A text that no other host has; it begins with the host name. Two containers of one machine are two hosts."""
    parts = [BOOT_ID.read_text().strip(), *(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES)]
    return f"{socket.gethostname()}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def machine(name: str = "") -> str:
    """A text that all containers of this machine with ``name`` have, and no other machine; its host name by default."""
    return f"{name or socket.gethostname()}-{hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()[:12]}"


def address_towards(peer: str) -> str:
    """The address of this host on the way to ``peer``, a name or an address. Raises OSError where there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(peer, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing
        own: str = probe.getsockname()[0]
        return own


def reachable_address(peer: str = FOREIGN_ADDRESS) -> str:
    """The address of this host for other hosts: that of the route to ``peer``, which is the default route if no peer
    is known, or of the first interface that has one. Raises SettingsError where there is none.
    """
    with suppress(OSError):
        return address_towards(peer)
    for interface in interfaces.names():
        with suppress(SettingsError):
            if (address := interfaces.address_of(interface)) not in OWN_ADDRESSES:
                return address
    raise SettingsError("no network interface of this host has an address, so other hosts cannot reach it")


def address_for(hosts: Iterable[str], environment: Mapping[str, str]) -> str:
    """The address of this host for ``hosts``, or for any where all of them are this one: on the way to the first.

    That of the interface HOROVOD_GLOO_IFACE of ``environment``, where it names one. Raises SettingsError.
    """
    interface = environment.get("HOROVOD_GLOO_IFACE", "").strip()
    others = (name for name in hosts if not is_this_host(name))
    return interfaces.address_of(interface) if interface else reachable_address(next(others, FOREIGN_ADDRESS))


def is_this_host(name: str) -> bool:
    """Whether ``name`` is a name of this host for itself, with or without its domain."""
    own = socket.gethostname(), socket.getfqdn()
    return name in ("localhost", *OWN_ADDRESSES) or any(_is_same(name, each) for each in own)


def _is_same(name: str, other: str) -> bool:
    """Two names with different domains are those of different hosts."""
    return name == other or other == name.partition(".")[0] or name == other.partition(".")[0]
