"""The table of flags: how they are written, which values they take, and which variable of the ranks they set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hvd_cluster.cli.values import (
    LEVELS,
    Parse,
    cores,
    count,
    duration,
    fraction,
    hosts,
    level,
    milliseconds,
    names,
    natural,
    page,
    port,
    seconds,
    switch,
    text,
    words,
)

MEBIBYTE = 1 << 20


def _plain(value: Any) -> str:
    """A whole number without a fraction, because scripts read some of the variables, too."""
    return str(int(value)) if isinstance(value, bool | float) and value == int(value) else str(value)


def _opposite(value: bool) -> str:
    return _plain(not value)


def _mebibytes(value: int) -> str:
    return str(value * MEBIBYTE)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of hvdrun.

    ``options`` are its ways to be written; the first long one gives its :attr:`name`. A flag without a ``metavar`` is a
    switch, and ``negatives`` switch it off. Others take a value that ``parse`` reads, or as many as ``metavar`` has
    words. ``key`` is the path of the value in a configuration file. If there is a ``variable``, the ranks get it, with
    ``encode(value)``.
    """

    options: tuple[str, ...]
    help: str
    metavar: str = ""
    parse: Parse = switch
    negatives: tuple[str, ...] = ()
    key: str = ""
    variable: str = ""
    encode: Callable[[Any], str] = _plain

    @property
    def name(self) -> str:
        """The name of the value in the program."""
        long = next(option for option in self.options if option.startswith("--"))
        return long.removeprefix("--").replace("-", "_")

    @property
    def words(self) -> int:
        """How many values it takes; 0: it is a switch."""
        return len(self.metavar.split())


def _pair(option: str, help: str, variable: str, key: str) -> Flag:
    """A switch whose negative is ``--no-...``."""
    return Flag((f"--{option}",), help, negatives=(f"--no-{option}",), variable=variable, key=key)


GENERAL = (
    Flag(("-np", "--num-proc"), "number of processes", "N", count, key="num_proc"),
    Flag(("--verbose",), "log the process id of each rank", negatives=("--no-verbose",), key="verbose"),
    Flag(
        ("--start-timeout",),
        "longest time for the processes to start; HOROVOD_START_TIMEOUT or 30 by default. It does not limit the time "
        "before init()",
        "SECONDS",
        seconds,
        key="start_timeout",
    ),
    Flag(
        ("--grace-seconds",),
        "time that a process has to end, or to hand over, after it was asked to; then it is killed. "
        "HOROVOD_GRACE_SECONDS or 5 by default",
        "SECONDS",
        seconds,
        key="grace_seconds",
    ),
    Flag(
        ("--network-interfaces", "--network-interface"),
        "network interfaces for the traffic between hosts, with commas between them; by default those of the routes "
        "between the launcher and the hosts",
        "NAMES",
        names,
        key="network_interfaces",
    ),
    Flag(
        ("--output-filename",),
        "also write the output of the processes to FOLDER/rank.<rank>/stdout and stderr, without prefixes",
        "FOLDER",
        text,
        key="output_filename",
    ),
    Flag(
        ("--horovod-alias",),
        "run a script that was written for Horovod: its import horovod.torch gives hvd_cluster.torch",
        negatives=("--no-horovod-alias",),
        key="horovod_alias",
    ),
    Flag(("--disable-cache",), "no effect: there is no cache of checks here", key="disable_cache"),
    Flag(("--gloo",), "hvdrun starts the ranks itself, which is the default", key="gloo"),
    Flag(("--mpi",), "mpirun starts the ranks", key="mpi"),
    Flag(("--jsrun",), "jsrun starts the ranks, within a job of LSF", key="jsrun"),
)
CONTROLLERS = ("gloo", "mpi", "jsrun")
"""The names of the flags that choose the program that starts the ranks."""
TUNEABLE = (
    Flag(
        ("--fusion-threshold-mb",),
        "most MiB of tensors that travel together; 0: each alone; 128 by default",
        "MIB",
        natural,
        key="params.fusion_threshold_mb",
        variable="HOROVOD_FUSION_THRESHOLD",
        encode=_mebibytes,
    ),
    Flag(
        ("--cycle-time-ms",),
        "milliseconds for which a rank waits for more tensors; the default depends on the number of cores",
        "MS",
        milliseconds,
        key="params.cycle_time_ms",
        variable="HOROVOD_CYCLE_TIME",
    ),
    Flag(
        ("--cache-capacity",),
        "most names of tensors that need no negotiation; 0: none; 1024 by default",
        "N",
        natural,
        key="params.cache_capacity",
        variable="HOROVOD_CACHE_CAPACITY",
    ),
    _pair(
        "hierarchical-allreduce",
        "allreduce within each host, then between hosts; by default where that is faster",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "params.hierarchical_allreduce",
    ),
    _pair(
        "hierarchical-allgather",
        "allgather within each host, then between hosts; by default where that is faster",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        "params.hierarchical_allgather",
    ),
    _pair(
        "torus-allreduce",
        "allreduce of tensors on GPUs within each host, then between hosts, by NCCL in both",
        "HOROVOD_TORUS_ALLREDUCE",
        "params.torus_allreduce",
    ),
)
AUTOTUNE = (
    _pair("autotune", "find the best parameters while the job runs", "HOROVOD_AUTOTUNE", "autotune.enabled"),
    Flag(
        ("--autotune-log-file",),
        "write the parameters that were tried, and how fast each was",
        "FILE",
        text,
        key="autotune.log_file",
        variable="HOROVOD_AUTOTUNE_LOG",
    ),
    Flag(
        ("--autotune-warmup-samples",),
        "trials that do not count; 3 by default",
        "N",
        natural,
        key="autotune.warmup_samples",
        variable="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    ),
    Flag(
        ("--autotune-steps-per-sample",),
        "steps of a sample; 10 by default",
        "N",
        count,
        key="autotune.steps_per_sample",
        variable="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    ),
    Flag(
        ("--autotune-bayes-opt-max-samples",),
        "trials of the Bayesian optimisation; 20 by default",
        "N",
        natural,
        key="autotune.bayes_opt_max_samples",
        variable="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    ),
    Flag(
        ("--autotune-gaussian-process-noise",),
        "noise of the scores, from 0 to 1; 0.8 by default",
        "NUMBER",
        fraction,
        key="autotune.gaussian_process_noise",
        variable="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    ),
)
ELASTIC = (
    Flag(("--min-np", "--min-num-proc"), "fewest processes to go on", "N", count, key="elastic.min_np"),
    Flag(
        ("--max-np", "--max-num-proc"),
        "most processes; by default the number that starts, or all slots of a host discovery script",
        "N",
        count,
        key="elastic.max_np",
    ),
    Flag(
        ("--slots-per-host", "--slots"),
        "processes on a host for which the host discovery script prints no number",
        "N",
        count,
        key="elastic.slots_per_host",
    ),
    Flag(
        ("--elastic-timeout",),
        "longest wait for enough processes; HOROVOD_ELASTIC_TIMEOUT or 600 by default",
        "SECONDS",
        seconds,
        key="elastic.timeout",
    ),
    Flag(
        ("--reset-limit",),
        "most failures and resizes together; no limit by default",
        "N",
        natural,
        key="elastic.reset_limit",
    ),
    Flag(
        ("--blacklist-cooldown-range",),
        "seconds for which a host with a failed process gets no new one, 1 to 3600; for ever by default",
        "MIN MAX",
        seconds,
        key="elastic.blacklist_cooldown_range",
    ),
)
TIMELINE = (
    Flag(
        ("--timeline-filename",),
        "write a timeline of all operations, for a trace viewer, or DYNAMIC; see docs/timeline.md",
        "FILE",
        text,
        key="timeline.filename",
        variable="HOROVOD_TIMELINE",
    ),
    _pair(
        "timeline-mark-cycles",
        "mark each cycle in the timeline",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "timeline.mark_cycles",
    ),
)
LIVE = (
    Flag(
        ("--dashboard",),
        "serve a live page of the job on this host; its link is printed. See docs/dashboard.md",
        negatives=("--no-dashboard",),
        key="dashboard.enabled",
    ),
    Flag(
        ("--dashboard-address",),
        "the address of the live page, which it also switches on; 127.0.0.1 and any free port by default",
        "ADDRESS:PORT",
        page,
        key="dashboard.address",
    ),
)
STALL = (
    Flag(
        ("--stall-check",),
        "report tensors that wait for ranks; the default",
        negatives=("--no-stall-check",),
        key="stall_check.enabled",
        variable="HOROVOD_STALL_CHECK_DISABLE",
        encode=_opposite,
    ),
    Flag(
        ("--stall-check-warning-time-seconds",),
        "time between two such reports; 60 by default",
        "SECONDS",
        seconds,
        key="stall_check.warning_time_seconds",
        variable="HOROVOD_STALL_CHECK_TIME_SECONDS",
    ),
    Flag(
        ("--stall-check-shutdown-time-seconds",),
        "time after which such a tensor ends the job; 0, the default: never",
        "SECONDS",
        duration,
        key="stall_check.shutdown_time_seconds",
        variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    ),
)
LIBRARY = (
    _pair(
        "mpi-threads-disable",
        "ask MPI for calls of one thread at a time only (MPI_THREAD_SERIALIZED), where tensors travel by MPI",
        "HOROVOD_MPI_THREADS_DISABLE",
        "library_options.mpi_threads_disable",
    ),
    Flag(
        ("--mpi-args",),
        "more arguments for mpirun, as in --mpi-args='--oversubscribe -v'; for MPI below jsrun with --jsrun",
        "WORDS",
        words,
        key="library_options.mpi_args",
    ),
    Flag(
        ("--tcp",),
        "let NCCL use no InfiniBand",
        negatives=("--no-tcp",),
        key="library_options.tcp",
        variable="NCCL_IB_DISABLE",
    ),
    Flag(
        ("--binding-args",),
        "arguments that bind ranks to cores, in place of those that hvdrun gives to mpirun or jsrun",
        "WORDS",
        words,
        key="library_options.binding_args",
    ),
    Flag(
        ("--num-nccl-streams",),
        "no effect: a process has one stream",
        "N",
        natural,
        key="library_options.num_nccl_streams",
        variable="HOROVOD_NUM_NCCL_STREAMS",
    ),
    Flag(
        ("--thread-affinity",),
        "the cores of the communication threads, one for each rank of a host, with commas between them",
        "CORES",
        cores,
        key="library_options.thread_affinity",
        variable="HOROVOD_THREAD_AFFINITY",
    ),
    Flag(
        ("--gloo-timeout-seconds",),
        "longest time for an operation, and for ranks to connect; 30 by default",
        "SECONDS",
        seconds,
        key="library_options.gloo_timeout_seconds",
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
    ),
)
LOGGING = (
    Flag(
        ("--log-level",),
        f"the least severe messages that are shown: {', '.join(LEVELS)}; WARNING by default",
        "LEVEL",
        level,
        key="logging.level",
        variable="HOROVOD_LOG_LEVEL",
    ),
    Flag(
        ("--log-with-timestamp", "--no-log-hide-timestamp"),
        "show the time in the log of the ranks; the default",
        negatives=("--log-without-timestamp", "--log-hide-timestamp"),
        key="logging.with_timestamp",
        variable="HOROVOD_LOG_HIDE_TIME",
        encode=_opposite,
    ),
    Flag(
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        "put the time before each line that the processes write",
        negatives=("--no-prefix-output-with-timestamp",),
        key="logging.prefix_output_with_timestamp",
    ),
)
HOSTS = (
    Flag(
        ("-H", "--hosts"),
        "hosts with their slots, such as node1:4,node2:4, which get ranks in this order; this host by default",
        "HOSTS",
        hosts,
        key="hosts.list",
    ),
    Flag(
        ("-hostfile", "--hostfile"),
        "a file with a line 'node1 slots=4' for each host",
        "FILE",
        text,
        key="hosts.file",
    ),
    Flag(
        ("--host-discovery-script",),
        "a program that prints a line host:slots for each host, and runs every second",
        "SCRIPT",
        text,
        key="hosts.discovery_script",
    ),
    Flag(
        ("--remote-shell",),
        "the command that runs sh on another host, with the name of the host for {host}; for the hosts of a discovery "
        "script there is none by default, else it is ssh",
        "COMMAND",
        text,
        key="hosts.remote_shell",
    ),
    Flag(("-p", "--ssh-port"), "the port of ssh on the other hosts", "PORT", port, key="ssh.port"),
    Flag(("-i", "-I", "--ssh-identity-file"), "the key file for ssh", "FILE", text, key="ssh.identity_file"),
)
GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "": GENERAL,
    "hosts": HOSTS,
    "elastic jobs": ELASTIC,
    "parameters": TUNEABLE,
    "autotuning": AUTOTUNE,
    "timeline": TIMELINE,
    "live page": LIVE,
    "stalls": STALL,
    "libraries": LIBRARY,
    "log": LOGGING,
}
"""The flags by group, in the order of the help."""


def all_flags() -> Iterator[Flag]:
    """The flags of all groups."""
    for flags in GROUPS.values():
        yield from flags


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """The variables of the ranks that ``values`` set; flags without a value set none."""
    given = [(flag, values.get(flag.name)) for flag in all_flags() if flag.variable]
    return {flag.variable: flag.encode(value) for flag, value in given if value is not None}
