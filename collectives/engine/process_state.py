"""The state of a process of this host, as its kernel knows it."""

from __future__ import annotations

from pathlib import Path

from collectives.planning.whereabouts import ProcessState

__all__ = ["state_of"]


def state_of(process: int) -> ProcessState | None:
    """The state of the process with this id; None if there is none, or its state cannot be read."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessState(process, fields[0].decode()) if fields else None
