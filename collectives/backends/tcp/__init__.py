"""Collectives over TCP connections of our own, for ranks of different hosts."""

from collectives.backends.tcp.backend import TcpBackend
from collectives.backends.tcp.joining import TcpJoining

__all__ = ["TcpBackend", "TcpJoining"]
