"""A job that mpirun or jsrun starts: the environment of its ranks, its command, and the process of the launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from collectives import LOOPBACK, usable_cores
from executors.agents.local.processes import check_command
from executors.agents.local.supervisor import Supervisor
from executors.agents.mpi import mpirun
from executors.agents.mpi.library import MpiLibrary, find_mpirun
from executors.agents.mpi.mpirun import Command, MpiJob
from executors.job.arguments import RESERVED
from executors.job.environment import exported, shared_threads
from executors.job.host import address_for, is_this_host
from executors.job.output import PlainSink, Sink, Sinks, say

PLACING = RESERVED | {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURMD_NODENAME"}
"""Variables that would tell all ranks that they are the same one, or on the same node."""

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"

WITHOUT_TIME = "{} cannot put the time before lines"
WITHOUT_PAGE = "no live page: {} starts the ranks, and no driver collects their numbers. Training goes on without it"


class MpiConsole:
    """The output of a launcher, which has put the rank before each line."""

    def sink(self, rank: int, name: str) -> Sink:
        return PlainSink(getattr(sys, name))


def environment_of(job: MpiJob, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launcher of ``job``: that of this process, without a place in a job, and ``variables``."""
    # Without an address, the port is the one that the user wants rank 0 to have.
    placing = PLACING if ADDRESS in os.environ else PLACING - {PORT}
    own = {name: value for name, value in os.environ.items() if name not in placing}
    given = {**own, "PYTHONUNBUFFERED": "1", **variables}
    is_here = all(map(is_this_host, job.hosts))
    return {**given, **(shared_threads(given, usable_cores(), job.size) if is_here else {})}


def mpirun_of(job: MpiJob, environment: Mapping[str, str]) -> Command:
    """The command of the mpirun on the PATH of ``environment``, with its whole environment.

    Raises CommandNotFoundError where there is no mpirun, or no command of ``job``; ExecutorError for an unknown mpirun.
    """
    check_command(job.command[0], environment)
    found = find_mpirun(environment)
    if job.has_timestamp and found.library in (MpiLibrary.MPICH, MpiLibrary.INTEL):
        say(WITHOUT_TIME.format(found.library.value))
    whole = replace(job, variables=exported(environment), address=_address(job, environment))
    command = mpirun.command_of(found, whole)
    return Command(command.words, {**environment, **command.variables})


def _address(job: MpiJob, environment: Mapping[str, str]) -> str | None:
    """That of this host for the others of ``job``, where the name of this host leads each host to itself."""
    is_alone = all(map(is_this_host, job.hosts))
    return None if is_alone or not {"localhost", LOOPBACK} & job.hosts.keys() else address_for(job.hosts, environment)


def start_launcher(
    supervisor: Supervisor,
    job: MpiJob,
    words: Sequence[str],
    environment: Mapping[str, str],
    output: Sinks,
    is_verbose: bool,
) -> None:
    """Start the launcher of ``job`` as the worker 0 of ``supervisor``. Raises OSError."""
    if is_verbose:
        say(shlex.join(words))
    if job.output_directory is not None:
        Path(job.output_directory).mkdir(parents=True, exist_ok=True)
    supervisor.launch(0, words, environment, output)
