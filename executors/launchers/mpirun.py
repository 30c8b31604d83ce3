"""Pure: mpirun of Open MPI, of MPICH and Intel MPI (Hydra), and of MVAPICH2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from executors.launchers.broadcast import ByBroadcast, ByMpi
from executors.launchers.known_ports import KnownPorts, Trust, ports_of
from executors.launchers.place import Place, Rendezvous, number, text

AZURE = ("AZ_BATCHAI_JOB_MASTER_NODE_IP", "AZ_BATCHAI_MPI_MASTER_NODE", "AZ_BATCH_MASTER_NODE")
"""Azure ML's MPI launcher names the host of rank 0 here; the last one has a port, too."""
NAMESPACE = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")


class OpenMpi:
    """mpirun of Open MPI, also as Kubeflow's MPI operator and Azure ML use it."""

    def place(self, environment: Mapping[str, str]) -> Place | None:
        rank, size = number(environment, "OMPI_COMM_WORLD_RANK"), number(environment, "OMPI_COMM_WORLD_SIZE")
        if rank is None or size is None:
            return None
        job = f"mpirun {text(environment, *NAMESPACE)}"
        return Place(
            launcher="mpirun (Open MPI)",
            variable="OMPI_COMM_WORLD_SIZE",
            rank=rank,
            size=size,
            job=job,
            rendezvous=_of_open_mpi(environment, size, job),
            node=text(environment, "PMIX_HOSTNAME"),
        )


def _of_open_mpi(environment: Mapping[str, str], size: int, job: str) -> Rendezvous:
    ports = ports_of(environment, job)
    if text(environment, *NAMESPACE) and number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        return KnownPorts.on_this_host(ports)
    master = text(environment, "MASTER_ADDR") or text(environment, *AZURE).partition(":")[0]
    if master:
        return KnownPorts((master,), ports, Trust.NETWORK)
    # MPI cannot start in a process that has used PMIx by itself, so mpi4py comes first.
    return ByBroadcast(("mpi4py", "pmix"), size)


class Hydra:
    """mpirun of MPICH and of Intel MPI, and srun --mpi=pmi2: PMI's variables."""

    def place(self, environment: Mapping[str, str]) -> Place | None:
        rank, size = number(environment, "PMI_RANK"), number(environment, "PMI_SIZE")
        if rank is None or size is None:
            return None
        return _with_pmi("mpirun (MPICH, Intel MPI) or srun with PMI", "PMI_SIZE", rank, size, environment)


class Mvapich:
    """mpirun of MVAPICH2."""

    def place(self, environment: Mapping[str, str]) -> Place | None:
        rank, size = number(environment, "MV2_COMM_WORLD_RANK"), number(environment, "MV2_COMM_WORLD_SIZE")
        if rank is None or size is None:
            return None
        return _with_pmi("mpirun (MVAPICH2)", "MV2_COMM_WORLD_SIZE", rank, size, environment)


def _with_pmi(launcher: str, variable: str, rank: int, size: int, environment: Mapping[str, str]) -> Place:
    rendezvous = ByBroadcast(("mpi4py if in use", "pmi", "mpi4py"), size)
    node = text(environment, "SLURMD_NODENAME", "PMI_HOSTNAME")
    return Place(launcher, variable, rank, size, "mpirun", rendezvous, node=node)


def place_among(members: Sequence[int], rank: int, node: str) -> Place:
    """The place of the process with this ``rank`` in MPI.COMM_WORLD, one of ``members``, in the order of the job.

    ``node`` is as in :class:`Place`.
    """
    return Place(
        launcher="MPI",
        variable="the size of its communicator",
        rank=list(members).index(rank),
        size=len(members),
        job=f"MPI {','.join(map(str, members))}",
        rendezvous=ByMpi(tuple(members)),
        node=node,
    )
