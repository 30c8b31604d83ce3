"""Collectives over TCP with torch's Gloo, for ranks of different hosts."""

from collectives.backends.gloo.bootstrap import GlooBootstrap
from collectives.backends.gloo.transport import GlooBackend

__all__ = ["GlooBackend", "GlooBootstrap"]
