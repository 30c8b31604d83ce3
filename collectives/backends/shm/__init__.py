"""Shared memory between the ranks of one host."""

from collectives.backends.shm.backend import ShmBackend
from collectives.backends.shm.joining import ShmJoining

__all__ = ["ShmBackend", "ShmJoining"]
