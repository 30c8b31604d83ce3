"""Addresses of hosts, which their launcher knows by name."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from contextlib import suppress

from collectives.api import SettingsError
from collectives.interfaces import LOOPBACK, address_of, names
from executors import host

__all__ = ["addresses_of", "own_addresses"]

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
    for interface in names():
        with suppress(SettingsError):
            found.append(address_of(interface))
    return [*(address for address in dict.fromkeys(found) if address != LOOPBACK), LOOPBACK]
