"""Shared memory between the ranks of one host."""

from collectives.backends.shm.backend import ShmBackend, ShmJoining

__all__ = ["ShmBackend", "ShmJoining"]
