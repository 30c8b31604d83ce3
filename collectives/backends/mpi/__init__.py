"""Collectives over MPI with mpi4py, for ranks that mpirun has started."""

from collectives.backends.mpi.joining import MpiJoining

__all__ = ["MpiJoining"]
