"""Collectives over MPI with mpi4py, for ranks that mpirun has started."""

from collectives.backends.mpi.bootstrap import MpiBootstrap

__all__ = ["MpiBootstrap"]
