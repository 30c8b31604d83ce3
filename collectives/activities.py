"""The names in Horovod's timeline for the steps that a tensor goes through."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["activity", "part"]

SHORT = {"BROADCAST": "BCAST"}
PARTS = {"copy in": "MEMCPY_IN_FUSION_BUFFER", "copy out": "MEMCPY_OUT_FUSION_BUFFER"}


@lru_cache(256)
def activity(operation: str, backend: str) -> str:
    """The work of ``backend`` for ``operation``, such as SHM_ALLREDUCE."""
    name = operation.upper()
    return f"{backend.upper()}_{SHORT.get(name, name)}"


@lru_cache(256)
def part(phase: str) -> str:
    """A phase inside of the backend."""
    return PARTS.get(phase) or phase.upper().replace(" ", "_")
