"""Collectives over TCP connections of our own, for ranks of different hosts."""

from collectives.backends.tcp.backend import TcpBackend
from collectives.backends.tcp.bootstrap import TcpBootstrap

__all__ = ["TcpBackend", "TcpBootstrap"]
