"""Collectives over TCP with torch's Gloo, for ranks of different hosts."""

from collectives.backends.gloo.joining import GlooJoining

__all__ = ["GlooJoining"]
