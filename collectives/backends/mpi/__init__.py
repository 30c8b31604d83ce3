"""Collectives over MPI with mpi4py, for ranks that mpirun has started."""

from collectives.backends.mpi.bootstrap import MpiBootstrap
from collectives.backends.mpi.transport import MpiBackend

__all__ = ["MpiBackend", "MpiBootstrap"]
