"""Pure: srun, the launcher of SLURM."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping

from executors.launchers.known_ports import KnownPorts, Trust, ports_of
from executors.launchers.place import Place, number, text


class Srun:
    """The variables of a task of a step. A batch script has SLURM_NTASKS and SLURM_PROCID, too, but is one process."""

    def place(self, environment: Mapping[str, str]) -> Place | None:
        rank, size = number(environment, "SLURM_PROCID"), number(environment, "SLURM_STEP_NUM_TASKS")
        if rank is None or size is None or not text(environment, "SLURM_STEP_ID"):
            return None
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        job = " ".join(["srun", *(text(environment, name) for name in names)])
        return Place(
            launcher="srun",
            variable="SLURM_STEP_NUM_TASKS",
            rank=rank,
            size=size,
            job=job,
            rendezvous=_rendezvous(environment, job),
            node=text(environment, "SLURMD_NODENAME"),
            remedy="set MASTER_ADDR to the host of task 0",
        )


def _rendezvous(environment: Mapping[str, str], job: str) -> KnownPorts | None:
    ports, hosts = ports_of(environment, job), expand(text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    master = text(environment, "MASTER_ADDR")
    if text(environment, "SLURM_STEP_NUM_NODES") == "1" or len(hosts) == 1:
        return KnownPorts.on_this_host(ports)
    return KnownPorts((master or hosts[0],), ports, Trust.USER) if master or hosts else None


MOST_NODES = 1 << 18
"""SLURM has 65,533 at most; a longer list is none."""
NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand(names: str) -> list[str]:
    """The hosts of a node list of SLURM: "n[1-2,07],m" -> n1, n2, n07, m; an empty list where it cannot be read."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", names)
    expanded = (name for part in parts for name in _expand_one(part.strip()))
    found = list(itertools.islice(expanded, MOST_NODES + 1))
    return found if len(found) <= MOST_NODES else []


def _expand_one(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MOST_NODES:
        return iter(())
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        match = NUMBERS.fullmatch(each.strip())
        if match is None:
            return []
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) + len(found) >= MOST_NODES:
            return []
        found += [str(value).zfill(len(first)) for value in range(int(first), int(last) + 1)]
    return found
