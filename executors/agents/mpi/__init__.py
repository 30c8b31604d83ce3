"""The launchers of MPI libraries and of LSF, where hvdrun calls them: which mpirun it is, and the words of its command.

The processes that they start are ranks like those of any launcher that is not ours: see ``executors/launchers``.
"""
