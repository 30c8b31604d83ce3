"""The hosts that a batch system has given to the job in which hvdrun runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from executors.job.host import is_this_host
from executors.launchers.lsf import slots_of_hosts
from executors.launchers.place import number, text
from executors.launchers.slurm import MOST_NODES, expand

SRUN = (
    "env -u SRUN_CPUS_PER_TASK -u SLURM_CPUS_PER_TASK -u SLURM_GPUS_PER_TASK -u SLURM_TRES_PER_TASK -u SLURM_GPU_BIND "
    "srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 "
    "--nodelist={host} --cpu-bind=none --mem=0 --mpi=none --export=ALL"
)
"""An agent gets all cores, memory and GPUs of the job on its node: without the options and variables of its tasks."""
HOST = "localhost"
RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The hosts of a job of ``system`` with their slots; ``shell`` runs ``sh`` on one of them, None: ssh does.

    This host is "localhost", if it is the only one.
    """

    system: str
    hosts: dict[str, int]
    shell: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this host alone, on which any number of ranks may start."""
        return self.hosts.keys() == {HOST}


def allocation_of(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation of the process with ``environment``; None without one, and in a rank of a job of ours."""
    if text(environment, RENDEZVOUS):
        return None
    return _slurm(environment) or _lsf(environment)


def _slurm(environment: Mapping[str, str]) -> Allocation | None:
    """In the batch script or under salloc; not in a task of srun, which is one of several launchers."""
    if (number(environment, "SLURM_STEP_NUM_TASKS") or 1) > 1:
        return None
    names, slots = expand(text(environment, "SLURM_JOB_NODELIST")), _slots_of_slurm(environment)
    if not names or len(names) != len(slots):
        return None
    hosts = _named(dict(zip(names, slots, strict=True)), text(environment, "SLURMD_NODENAME"))
    return Allocation("SLURM", hosts, SRUN if hosts.keys() - {HOST} else None)


def _named(hosts: Mapping[str, int], own: str) -> dict[str, int]:
    """``hosts`` as they can be reached; this one, which its batch system knows as ``own``, has another name if alone.

    Among others it keeps its name: mpirun of a batch system knows no other.
    """
    first = next(iter(hosts), "")
    is_alone = len(hosts) == 1 and (first == own or is_this_host(first))
    return {HOST: hosts[first]} if is_alone else dict(hosts)


def _slots_of_slurm(environment: Mapping[str, str]) -> list[int]:
    """The tasks of each node where the user has asked for tasks, else the cores, less those that a task needs."""
    if text(environment, "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        return _counts(text(environment, "SLURM_TASKS_PER_NODE"))
    each = number(environment, "SLURM_CPUS_PER_TASK") or 1
    return [max(1, cores // each) for cores in _counts(text(environment, "SLURM_JOB_CPUS_PER_NODE"))]


def _counts(repeated: str) -> list[int]:
    """The numbers in a list of SLURM: "2(x3),1" -> 2, 2, 2, 1; an empty list where it cannot be read."""
    matches = [COUNT.fullmatch(part.strip()) for part in repeated.split(",")]
    counts = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if len(counts) != len(matches) or sum(nodes for _, nodes in counts) > MOST_NODES:
        return []
    return [count for count, nodes in counts for _ in range(nodes)]


def _lsf(environment: Mapping[str, str]) -> Allocation | None:
    """The batch script runs on the first host, which may not compute."""
    hosts = slots_of_hosts(environment) if text(environment, "LSB_JOBID") else {}
    first = text(environment, "LSB_MCPU_HOSTS", "LSB_HOSTS").partition(" ")[0]
    return Allocation("LSF", _named(hosts, first)) if hosts else None
