"""Collectives over MPI with mpi4py, for ranks that mpirun has started."""

from collectives.backends.mpi.joining import MpiJoining
from collectives.backends.mpi.transport import MpiBackend

__all__ = ["MpiBackend", "MpiJoining"]
