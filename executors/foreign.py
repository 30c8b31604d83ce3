"""Pure: which foreign launcher started this process as one of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FOREIGN_LAUNCHERS", "ForeignLauncher", "Rank", "foreign_rank"]


@dataclass(frozen=True, slots=True)
class ForeignLauncher:
    """A launcher, the variable that holds the number of its processes, and others that it sets with it."""

    name: str
    size: str
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """This process is one of ``size`` that ``launcher`` started."""

    launcher: ForeignLauncher
    size: int


FOREIGN_LAUNCHERS = (
    ForeignLauncher("torchrun", "WORLD_SIZE", ("RANK", "LOCAL_RANK")),
    ForeignLauncher("a launcher for torch.distributed, such as Kubeflow,", "WORLD_SIZE", ("RANK", "MASTER_ADDR")),
    ForeignLauncher("mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
    ForeignLauncher("mpirun (MVAPICH2)", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_RANK",)),
    ForeignLauncher("mpirun (MPICH, Intel MPI) or srun with PMI", "PMI_SIZE", ("PMI_RANK",)),
    ForeignLauncher("jsrun", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_RANK",)),
    # Not SLURM_NTASKS: a batch script has it, too, but is a single process.
    ForeignLauncher("srun", "SLURM_STEP_NUM_TASKS", ("SLURM_STEP_ID", "SLURM_PROCID")),
)
"""In the order of the search: srun comes last because it starts the daemons of the others on the hosts of its job."""


def foreign_rank(environment: Mapping[str, str]) -> Rank | None:
    """The foreign launcher that started the process with ``environment``, or None.

    None also for a process of one of our launchers, for a launcher that started one process only, and where the user
    has set HOROVOD_SIZE.
    """
    if _text(environment, "HOROVOD_GLOO_RENDEZVOUS_ADDR") or _text(environment, "HOROVOD_SIZE"):
        return None
    ranks = (Rank(launcher, _size(launcher, environment)) for launcher in FOREIGN_LAUNCHERS)
    return next((rank for rank in ranks if rank.size > 1), None)


def _size(launcher: ForeignLauncher, environment: Mapping[str, str]) -> int:
    text = _text(environment, launcher.size)
    is_complete = all(_text(environment, name) for name in launcher.others)
    return int(text) if is_complete and text.isascii() and text.isdigit() else 1


def _text(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name, "").strip()
