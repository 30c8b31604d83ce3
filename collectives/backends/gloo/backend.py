"""Collectives over TCP with torch's Gloo."""

from __future__ import annotations

from typing import Any

from collectives.backends.gloo.connections import Connections
from collectives.backends.gloo.transport import GlooTransport
from collectives.backends.group import Group
from collectives.backends.messaging import MessagingBackend

__all__ = ["GlooBackend"]


class GlooBackend(MessagingBackend):
    """A member of ``group``, with the connected ``process_group`` of torch, its ``timeout`` and its ``connections``.

    :class:`~collectives.backends.gloo.joining.GlooJoining` connects them.
    """

    def __init__(self, group: Group, process_group: Any, connections: Connections, timeout: float) -> None:
        super().__init__(GlooTransport(group, process_group, connections, timeout))
