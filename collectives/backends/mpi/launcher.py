"""The mpirun that has started this process, as its variables tell, beside the MPI that mpi4py has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collectives.api import SettingsError

__all__ = ["FITTING", "describe", "refuse_other"]

BY_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
FITTING = (
    "start the script by the mpirun of the MPI which mpi4py has loaded, or let mpi4py load that of the other mpirun: "
    "put the path of its libmpi.so in MPI4PY_LIBMPI, or its folder in LD_LIBRARY_PATH"
)


def describe(mpi: Any) -> str:
    """The name and version of MPI's library, for a message."""
    return " ".join(str(mpi.Get_library_version()).split("\n")[0].split()).rstrip("\0, ")


def refuse_other(mpi: Any, environment: Mapping[str, str]) -> None:
    """Raise SettingsError where MPI_Init would end the process: an MPICH without PMIx, started by Open MPI's mpirun.

    Any other pair of an MPI and an mpirun ends with worlds of one rank, if it does not fit.
    """
    if BY_OPEN_MPI not in environment:
        return
    version = str(mpi.Get_library_version())
    if "MPICH configure:" in version and "pmix" not in version:
        raise SettingsError(
            f"the mpirun of Open MPI has started this process, but mpi4py has loaded another MPI ({describe(mpi)}), "
            f"whose MPI_Init would end the process: {FITTING}"
        )
