"""The binding of Gloo: torch's where torch is installed, pygloo's elsewhere."""

from __future__ import annotations

from collectives.backends.gloo.joining import GlooJoining
from collectives.backends.gloo.library import import_torch
from collectives.backends.group import Group
from collectives.backends.joining import Joining
from collectives.backends.pygloo.joining import PyglooJoining
from collectives.backends.pygloo.library import require_pygloo

__all__ = ["join_gloo", "preload_gloo"]


def preload_gloo() -> str:
    """The name of the binding, which is ready for use then; ImportError with the remedy where there is none."""
    try:
        import_torch()
    except ImportError:
        try:
            require_pygloo()
        except ImportError:
            pass
        else:
            return "pygloo"
        raise
    return "torch"


def join_gloo(group: Group, timeout: float, address: str) -> Joining:
    """The joining of the binding. Raises the errors of GlooJoining and PyglooJoining."""
    return (GlooJoining if preload_gloo() == "torch" else PyglooJoining)(group, timeout, address)
