"""Pure: where the live page is served."""

from __future__ import annotations

from dataclasses import dataclass

from collectives.net.interfaces import LOOPBACK

LARGEST_PORT = 65535
FORM = "an address and a port, such as 127.0.0.1:8265, 0.0.0.0:0 for any free port, or [::1]:8265"


@dataclass(frozen=True, slots=True)
class Address:
    """An address of this host, and a port; 0: any free one."""

    host: str = LOOPBACK
    port: int = 0

    @classmethod
    def of(cls, given: object, name: str = "dashboard") -> Address | None:
        """What the user has ``given`` as ``name``; None for no page. Raises ValueError.

        True means any free port of the loopback interface; text is read by :meth:`parse`.
        """
        if given is None or given is False:
            return None
        if given is True:
            return cls()
        try:
            return cls.parse(given if isinstance(given, str) else "")
        except ValueError as error:
            raise ValueError(f"{name} is {given!r}, but must be True or {error}") from None

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in ``text``; raises ValueError, which says what is allowed."""
        host, colon, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        is_number = port.isascii() and port.isdigit() and int(port) <= LARGEST_PORT
        if not (colon and host and host.isprintable() and " " not in host and is_number):
            raise ValueError(FORM)
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
