"""Pure: a job -> the rank file of jsrun, IBM's launcher on clusters with LSF, and the command that uses it."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Mapping

from executors.agents.mpi.mpirun import MpiJob

TITLE = "overlapping_rs: allow\ncpu_index_using: logical\n"


def evenly(size: int, hosts: Mapping[str, int]) -> dict[str, int]:
    """The slots of ``hosts`` that ``size`` ranks take, spread evenly. Raises ValueError if there are too few."""
    total = sum(hosts.values())
    if total < size:
        raise ValueError(f"{size} processes need {size} slots, but the job of LSF has {total}; ask bsub for more hosts")
    slots = (name for turn in range(max(hosts.values())) for name, count in hosts.items() if turn < count)
    taken = Counter(itertools.islice(slots, size))
    return {name: taken[name] for name in hosts if taken[name]}


def rank_file(hosts: Mapping[str, int], cores: Mapping[str, int], threads: int) -> str:
    """The explicit resource file: all ranks of ``hosts``, each with its share of the cores of its host.

    ``cores`` are those of each host of the job, each of which runs ``threads`` hardware threads: jsrun counts these.
    Raises ValueError for a host that is none of the job, and for one with fewer cores than ranks.
    """
    lines, rank = [TITLE], 0
    for host, ranks in hosts.items():
        share = _share(host, ranks, cores) * threads
        for first in range(0, ranks * share, share):
            cpus = f"{{{first}-{first + share - 1}}}"
            lines.append(f"rank: {rank}: {{ hostname: {host}; cpu: {cpus} ; gpu: * ; mem: * }}\n")
            rank += 1
    return "".join(lines)


def _share(host: str, ranks: int, cores: Mapping[str, int]) -> int:
    if host not in cores:
        raise ValueError(f"host {host!r} does not belong to this job of LSF, whose hosts are {', '.join(cores)}")
    if cores[host] < ranks:
        raise ValueError(
            f"host {host!r} has {cores[host]} cores for {ranks} ranks; give it at most {cores[host]} slots"
        )
    return cores[host] // ranks


def command_of(job: MpiJob, file: str) -> list[str]:
    """The command that runs ``job`` by jsrun, on the cores of the rank file ``file``.

    The ranks get all variables of jsrun. The words for MPI travel as one.
    """
    words = ["jsrun", *job.binding("--erf_input", file)]
    if job.output_directory is not None:
        for name in ("stdout", "stderr"):
            words += [f"--stdio_{name}", f"{job.output_directory}/{name}"]
    smpi = shlex.join([*(["-tcp"] if job.has_tcp_only else []), *job.mpi_args])
    return [*words, *(["--smpiargs", smpi] if smpi else []), *job.command]
