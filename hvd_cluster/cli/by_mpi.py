"""``hvdrun --mpi`` and ``--jsrun``: mpirun or jsrun starts the ranks, which find one another in ``init()``."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from executors import Ended, Supervisor, Unheard, check_command, passed_on, say, slots_of_hosts
from executors.agents.mpi import WITHOUT_TIME, MpiConsole, MpiJob, environment_of, jsrun, mpirun_of, start_launcher
from hvd_cluster.cli.command_line import CommandLine
from hvd_cluster.cli.flags import CONTROLLERS, all_flags

OURS = CONTROLLERS[0]
FOR_OURS = (
    "min_np",
    "max_np",
    "slots_per_host",
    "elastic_timeout",
    "reset_limit",
    "blacklist_cooldown_range",
    "host_discovery_script",
    "remote_shell",
    "grace_seconds",
)
FOR_OTHERS = ("mpi_args", "binding_args")
UNHEARD = "neither {} nor a rank on this host has a handler for {}; the ranks go on without it"
SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")


def check_controller(line: CommandLine) -> None:
    """Raise ValueError for an option that the controller of ``line`` cannot heed."""
    controller = line.controller
    refused = FOR_OTHERS if controller == OURS else FOR_OURS
    given = next((flag.options[0] for flag in all_flags() if flag.name in refused and line[flag.name] is not None), "")
    if given and controller == OURS:
        raise ValueError(f"{given} is for --mpi and --jsrun; give one of them, or leave it out")
    if given:
        text = f"{given} is for ranks that hvdrun starts itself, and --{controller} lets another program start them"
        raise ValueError(f"{text}; leave out one of the two")


@dataclass(frozen=True, slots=True)
class ForeignLaunch:
    """``job``, which mpirun starts, or jsrun if there is a ``rank_file``: its content, empty if it is not needed.

    The ranks get the ``variables`` besides those of this process.
    """

    job: MpiJob
    variables: Mapping[str, str]
    rank_file: str | None = None
    is_verbose: bool = False

    @classmethod
    def of(cls, line: CommandLine, hosts: Mapping[str, int] | None, variables: Mapping[str, str]) -> ForeignLaunch:
        """From a checked ``line`` and ``hosts`` with the slots that the ranks take. Raises ValueError.

        None: this host for mpirun, those of the job of LSF for jsrun.
        """
        if line.controller == "mpi":
            used = hosts or {"localhost": line["num_proc"]}
            return cls(_job(line, used), variables, is_verbose=bool(line["verbose"]))
        cores = _cores_of_lsf()
        used = hosts or jsrun.evenly(line["num_proc"], cores)
        file = "" if line["binding_args"] is not None else jsrun.rank_file(used, cores, _threads_of_core())
        return cls(_job(line, used), variables, file, bool(line["verbose"]))

    @property
    def launcher(self) -> str:
        """The program that starts the ranks."""
        return "mpirun" if self.rank_file is None else "jsrun"

    def run(self) -> int:
        """Return the exit code of the launcher when it has ended; negative for a signal.

        Raises CommandNotFoundError and ExecutorError before anything is started, and OSError.
        """
        environment = environment_of(self.job, self.variables)
        if self.rank_file is None:
            command = mpirun_of(self.job, environment)
            return self._run(command.words, command.variables)
        return self._by_jsrun(environment, self.rank_file)

    def _by_jsrun(self, environment: Mapping[str, str], content: str) -> int:
        check_command(self.job.command[0], environment)
        check_command("jsrun", environment)
        if self.job.has_timestamp:
            say(WITHOUT_TIME.format("jsrun"))
        with _file(content) as name:
            return self._run(jsrun.command_of(self.job, name), environment)

    def _run(self, words: list[str], environment: Mapping[str, str]) -> int:
        supervisor = Supervisor()
        with passed_on(lambda number: supervisor.soon(lambda: _pass_on(supervisor, number))), supervisor:
            start_launcher(supervisor, self.job, words, environment, MpiConsole(), self.is_verbose)
            for event in supervisor.events():
                if isinstance(event, Unheard):
                    say(UNHEARD.format(self.launcher, signal.Signals(event.number).name))
                elif isinstance(event, Ended):
                    code = event.code
        return code


def _pass_on(supervisor: Supervisor, number: int) -> None:
    """To mpirun, which passes it on, or ends its ranks."""
    supervisor.pass_on(number)


def _job(line: CommandLine, hosts: Mapping[str, int]) -> MpiJob:
    folder = line["output_filename"]
    return MpiJob(
        command=line.command,
        hosts=hosts,
        nics=line["network_interfaces"] or (),
        ssh_port=line["ssh_port"],
        ssh_identity_file=line["ssh_identity_file"],
        has_tcp_only=bool(line["tcp"]),
        output_directory=None if folder is None else os.path.abspath(folder),
        has_timestamp=bool(line["prefix_output_with_timestamp"]),
        mpi_args=line["mpi_args"] or (),
        binding_args=line["binding_args"],
    )


def _cores_of_lsf() -> dict[str, int]:
    """The cores of each host of the job of LSF, for which a core is a slot. Raises ValueError outside of such a job."""
    cores = slots_of_hosts(os.environ) if os.environ.get("LSB_JOBID") else {}
    if not cores:
        raise ValueError("--jsrun is for jobs of LSF, and LSB_JOBID and LSB_MCPU_HOSTS name none; submit it with bsub")
    return cores


def _threads_of_core() -> int:
    """The hardware threads of a core of this host: the hosts of such a cluster are of one kind."""
    try:
        ranges = [part.partition("-") for part in SIBLINGS.read_text().strip().split(",")]
    except OSError:
        return 1
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


@contextmanager
def _file(content: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", prefix="hvdrun-", suffix=".erf") as file:
        file.write(content)
        file.flush()
        yield file.name
