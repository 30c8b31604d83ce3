"""Pure: a job -> the command of mpirun, in the words of each MPI. Those for Open MPI are the ones of Horovod."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from executors.agents.mpi.library import MpiLibrary, Mpirun

LARGE_CLUSTER = 64
OWN_PREFIXES = ("HYDI_", "HYDRA_", "I_MPI_", "OMPI_", "OPAL_", "PMI_", "PMIX_", "PRTE_")
"""The variables of an MPI itself, which its mpirun reads, and sets anew for each rank."""

PARAMETERS = {"pml": "ob1", "btl": "^openib"}
"""Of Open MPI, which ends with an error where a user gives another value of one of them besides."""


@dataclass(frozen=True, slots=True)
class MpiJob:
    """``command`` on ranks that take all slots of ``hosts``, in this order.

    The ranks get the ``variables``, which are names: values are on no command line. ``nics`` are the network
    interfaces, ``output_directory`` a folder for the output, ``mpi_args`` more arguments for mpirun. ``binding_args``
    replace those that say how ranks are bound to cores. ``address`` is that of this host for the others, where
    ``hosts`` name it only for itself.
    """

    command: Sequence[str]
    hosts: Mapping[str, int]
    variables: Iterable[str] = ()
    nics: Sequence[str] = ()
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    has_tcp_only: bool = False
    output_directory: str | None = None
    has_timestamp: bool = False
    mpi_args: Sequence[str] = ()
    binding_args: Sequence[str] | None = None
    address: str | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.hosts.values())

    @property
    def slots(self) -> str:
        """The hosts with their slots, as in ``-H``."""
        return ",".join(f"{name}:{count}" for name, count in self.hosts.items())

    @property
    def names(self) -> list[str]:
        """The variables to export, in order."""
        return sorted(name for name in self.variables if not name.startswith(OWN_PREFIXES))

    @property
    def ssh_options(self) -> str:
        """The words for ssh, in one."""
        given = {"-p": self.ssh_port, "-i": self.ssh_identity_file}
        return shlex.join(word for name, value in given.items() if value is not None for word in (name, str(value)))

    def binding(self, *default: str) -> list[str]:
        """The arguments that bind ranks to cores: those of the user, or else the ``default``."""
        return list(default if self.binding_args is None else self.binding_args)


@dataclass(frozen=True, slots=True)
class Command:
    """The ``words`` of a command, and the ``variables`` to add to its environment."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def command_of(mpirun: Mpirun, job: MpiJob) -> Command:
    """The command that runs ``job`` by ``mpirun``."""
    if mpirun.library is MpiLibrary.INTEL and not _fills_evenly(job.hosts):
        return Command([mpirun.program, *_intel_by_host(job)])
    dialect = DIALECTS[mpirun.library](job)
    return Command([mpirun.program, *dialect.words, *job.mpi_args, *job.command], dialect.variables)


def _open_mpi(job: MpiJob) -> Command:
    binding = job.binding("--bind-to", "none", "--map-by", "slot")
    given = {name for option, name in pairwise(job.mpi_args) if option.lstrip("-") == "mca"}
    own = {name: value for name, value in PARAMETERS.items() if name not in given}
    return _of_open_mpi(job, [*binding, *(word for item in own.items() for word in ("--mca", *item))])


def _spectrum(job: MpiJob) -> Command:
    binding = job.binding("--bind-to", "socket", "--map-by", "socket", "--rank-by", "core")
    return _of_open_mpi(job, [*binding, *(["-tcp"] if job.has_tcp_only else [])])


def _of_open_mpi(job: MpiJob, own: Sequence[str]) -> Command:
    words = ["--allow-run-as-root", "--tag-output", "-np", str(job.size), "-H", job.slots, *own]
    if len(job.hosts) >= LARGE_CLUSTER:
        words += ["--mca", "plm_rsh_no_tree_spawn", "true", "--mca", "plm_rsh_num_concurrent", str(len(job.hosts))]
    if job.ssh_options:
        words += ["--mca", "plm_rsh_args", job.ssh_options]
    if job.nics:
        words += ["--mca", "btl_tcp_if_include", ",".join(job.nics)]
    if job.output_directory is not None:
        # Open MPI 4 makes folders in this one, Open MPI 5 files beside it.
        words += ["--output-filename", f"{job.output_directory}/rank"]
    if job.has_timestamp:
        words += ["--timestamp-output"]
    return Command([*words, *(word for name in job.names for word in ("-x", name))])


def _mpich(job: MpiJob) -> Command:
    words = ["-np", str(job.size), "-hosts", job.slots, *job.binding("-bind-to", "none"), *_of_hydra(job)]
    if job.address is not None and "-localhost" not in job.mpi_args:  # for the connections of other hosts to mpirun
        words += ["-localhost", job.address]
    # MPICH has no option for the words of ssh.
    variables = {"HYDRA_LAUNCHER_EXTRA_ARGS": job.ssh_options} if job.ssh_options else {}
    return Command([*words, *(["-launcher", "ssh"] if job.ssh_options else [])], variables)


def _intel(job: MpiJob) -> Command:
    slots = str(next(iter(job.hosts.values())))
    words = ["-np", str(job.size), "-ppn", slots, "-hosts", ",".join(job.hosts), *_of_intel(job)]
    return Command(words)


def _intel_by_host(job: MpiJob) -> list[str]:
    """Intel MPI takes one number of slots for all hosts; where these differ, each host has words of its own.

    Source: the reference of Intel MPI, "Local Options": ``mpirun OPTIONS -n 2 -host a COMMAND : -n 4 -host b COMMAND``.
    """
    sets = [["-n", str(count), "-host", name, *job.command] for name, count in job.hosts.items()]
    first, *others = sets
    return [*_of_intel(job), *job.mpi_args, *first, *(word for words in others for word in (":", *words))]


def _of_intel(job: MpiJob) -> list[str]:
    ssh = ["-bootstrap", "ssh", "-bootstrap-exec-args", job.ssh_options] if job.ssh_options else []
    return [*job.binding(), *ssh, *_of_hydra(job)]


def _of_hydra(job: MpiJob) -> list[str]:
    """The rank stands before each line, but not in files."""
    words = ["-iface", job.nics[0]] if job.nics else []
    if job.output_directory is None:
        words.append("-l")
    else:
        for option, name in (("-outfile-pattern", "stdout"), ("-errfile-pattern", "stderr")):
            words += [option, f"{job.output_directory}/rank.%r.{name}"]
    return [*words, "-genvlist", ",".join(job.names)]


def _fills_evenly(hosts: Mapping[str, int]) -> bool:
    """Whether the hosts have equal slots; the last one may have fewer."""
    first, *others = hosts.values()
    return all(count == first for count in others[:-1]) and all(count <= first for count in others[-1:])


DIALECTS: dict[MpiLibrary, Callable[[MpiJob], Command]] = {
    MpiLibrary.OPEN_MPI: _open_mpi,
    MpiLibrary.SPECTRUM: _spectrum,
    MpiLibrary.INTEL: _intel,
    MpiLibrary.MPICH: _mpich,
}
