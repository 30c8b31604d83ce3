"""The identity of the host that this process runs on, and its address."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

__all__ = ["address_towards", "identity"]

# Processes that share these share memory, loopback addresses and process ids.
NAMESPACES = ("ipc", "mnt", "net", "pid")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ANY_PORT = 9


def identity() -> str:
    """A text that no other host has; it begins with the host name. Two containers of one machine are two hosts."""
    parts = [BOOT_ID.read_text().strip(), *(os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES)]
    return f"{socket.gethostname()}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def address_towards(peer: str) -> str:
    """The address of this host on the way to ``peer``, a name or an address. Raises OSError where there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(peer, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing
        own: str = probe.getsockname()[0]
        return own
