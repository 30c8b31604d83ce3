"""Collectives over TCP with torch's Gloo, for ranks of different hosts."""

from collectives.backends.gloo.bootstrap import GlooBootstrap

__all__ = ["GlooBootstrap"]
