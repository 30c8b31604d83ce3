"""The network interfaces of this host, and sockets that listen at their addresses."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from pathlib import Path

from collectives.api import SettingsError

LOOPBACK = "127.0.0.1"
ANY = "::"
"""All addresses of this host, those of IPv4, too."""
NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
BACKLOG = 4096
"""The number of connections that may wait in the kernel until there is room for them; the kernel may allow fewer."""
SIOCGIFADDR = 0x8915  # netdevice(7)
NAME_BYTES = 15
IPV6 = Path("/proc/net/if_inet6")
"""A line for each address: in hex digits, the numbers of interface, prefix, scope and flags, and the interface."""
LINK_SCOPE = 0x20
"""The scope of an address that cannot be used without the name of an interface, which differs from host to host."""
UNUSABLE = 0x08 | 0x40
"""The flags of an address that another host has, too, or may have."""


def everywhere() -> str:
    """The host for a server that clients of either family reach at any address of this host."""
    return ANY if socket.has_dualstack_ipv6() else "0.0.0.0"


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address of a network."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on ``host``, an address or ANY. Raises OSError, also for a text that is no address."""
    is_any = host == ANY and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=BACKLOG, dualstack_ipv6=is_any)
    except UnicodeError as error:
        raise OSError(f"no such address ({error})") from None
    except OSError as error:
        if is_any and error.errno in NO_IPV6:
            return listen("0.0.0.0", port)
        raise


def names() -> list[str]:
    """The names of the interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """The IPv4 address of ``interface``, or its first IPv6 address that other hosts can use. Linux only.

    SettingsError that lists the interfaces when there is none.
    """
    try:
        return _ipv4(interface)
    except OSError as error:
        addresses = _ipv6(interface)
        if addresses:
            return addresses[0]
        raise SettingsError(
            f"HOROVOD_GLOO_IFACE is {interface!r}, which has no address here ({error}); the interfaces of this host "
            f"are: {', '.join(names())}"
        ) from error


def _ipv4(interface: str) -> str:
    name = interface.encode()[: NAME_BYTES + 1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("16s240x", name))
    return socket.inet_ntoa(answer[20:24])


def _ipv6(interface: str) -> list[str]:
    try:
        lines = IPV6.read_text().splitlines()
    except OSError:  # the kernel has no IPv6
        return []
    return [address for line in lines if (address := _parsed(line.split(), interface))]


def _parsed(fields: list[str], interface: str) -> str:
    """The address in a line of IPV6; empty for one of another interface, or one that other hosts cannot use."""
    digits, _, _, scope, flags, name = fields
    if name != interface or int(scope, 16) & LINK_SCOPE or int(flags, 16) & UNUSABLE:
        return ""
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
