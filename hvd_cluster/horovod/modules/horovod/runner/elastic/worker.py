"""Notices of changed hosts for a state."""

from __future__ import annotations

from enum import IntFlag

__all__ = ["HostUpdateResult"]


class HostUpdateResult(IntFlag):
    """How the hosts have changed, for ``State.on_hosts_updated``."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
