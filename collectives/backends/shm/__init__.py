"""Shared memory between the ranks of one host."""

from collectives.backends.shm.backend import ShmBackend, ShmBootstrap

__all__ = ["ShmBackend", "ShmBootstrap"]
