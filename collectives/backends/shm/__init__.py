"""Shared memory between the ranks of one host."""

from collectives.backends.shm.backend import ShmBackend

__all__ = ["ShmBackend"]
