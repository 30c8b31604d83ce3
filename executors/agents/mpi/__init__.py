"""The launchers of MPI libraries and of LSF, where hvdrun calls them: which mpirun it is, and the words of its command.

The processes that they start are ranks like those of any launcher that is not ours: see ``executors/launchers``.
"""

from typing import TYPE_CHECKING

from collectives import facade

if TYPE_CHECKING:
    from executors.agents.mpi.function import MpiOptions, run_function_by_mpi
    from executors.agents.mpi.launch import (
        WITHOUT_PAGE,
        WITHOUT_TIME,
        MpiConsole,
        environment_of,
        mpirun_of,
        start_launcher,
    )
    from executors.agents.mpi.library import find_mpirun
    from executors.agents.mpi.mpirun import MpiJob
else:
    __getattr__ = facade(
        __name__,
        {
            "function": "MpiOptions run_function_by_mpi",
            "launch": "MpiConsole WITHOUT_PAGE WITHOUT_TIME environment_of mpirun_of start_launcher",
            "library": "find_mpirun",
            "mpirun": "MpiJob",
        },
    )
