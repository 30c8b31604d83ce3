"""Collectives over TCP with torch's Gloo, for ranks of different hosts."""

from collectives.backends.gloo.backend import GlooBackend

__all__ = ["GlooBackend"]
