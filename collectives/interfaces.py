"""The network interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct

from collectives.api import SettingsError

__all__ = ["address_of", "names"]

SIOCGIFADDR = 0x8915  # netdevice(7)
NAME_BYTES = 15


def names() -> list[str]:
    """The names of the interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """The IPv4 address of ``interface``; SettingsError that lists the interfaces when there is none. Linux only."""
    name = interface.encode()[: NAME_BYTES + 1]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("16s240x", name))
    except OSError as error:
        raise SettingsError(
            f"HOROVOD_GLOO_IFACE is {interface!r}, which has no IPv4 address here ({error}); the interfaces of this "
            f"host are: {', '.join(names())}"
        ) from error
    return socket.inet_ntoa(answer[20:24])
