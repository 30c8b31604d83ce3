"""Collectives over TCP with torch's Gloo, for ranks of different hosts."""

from collectives.backends.gloo.joining import GlooJoining
from collectives.backends.gloo.transport import GlooBackend

__all__ = ["GlooBackend", "GlooJoining"]
