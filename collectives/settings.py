"""Every ``HOROVOD_*`` variable of the engine, read once, validated, frozen.

No other module of the engine reads the environment.
"""

from __future__ import annotations

import base64
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from collectives.api import LONGEST_SECONDS, SettingsError, Timeouts, Topology, World

ENVIRONMENT_SECRET = "_HOROVOD_SECRET_KEY"

LOOPBACK = "127.0.0.1"
UNUSED = (
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_CCL_CACHE",
    "HOROVOD_DISABLE_NVTX_RANGES",
    "HOROVOD_NUM_NCCL_STREAMS",
)
"""Variables of Horovod for features that do not exist here."""

CPU_OPERATIONS = ("shm", "tcp", "gloo", "pygloo", "mpi")
"""The backends that HOROVOD_CPU_OPERATIONS can ask for."""

GPU_OPERATIONS_BY_HOST = ("tcp", "gloo", "pygloo", "mpi")
"""The backends of the host that HOROVOD_GPU_OPERATIONS can ask for; shm serves one host alone."""

CPU_OPERATIONS_NOT_YET = ("ccl",)
"""Values of Horovod for HOROVOD_CPU_OPERATIONS that stand for libraries without a binding yet."""

FOREIGN = ("gloo", "pygloo", "mpi", "nccl")
"""The backends with connections of their own."""

TUNED: Mapping[str, Sequence[str]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_threshold",),
    "HOROVOD_CYCLE_TIME": ("cycle_time", "patient", "patience"),
    "HOROVOD_CACHE_CAPACITY": ("cache_capacity",),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": ("hierarchical_allreduce",),
    "HOROVOD_HIERARCHICAL_ALLGATHER": ("hierarchical_allgather",),
}
"""The parameters that each variable sets, which autotuning leaves alone then."""

DYNAMIC_TIMELINE = "DYNAMIC"
T = TypeVar("T")
Plain = TypeVar("Plain", bool, int, float, str)
MEBIBYTE = 1 << 20
LONGEST_JOB = 200


@dataclass(frozen=True, slots=True)
class Autotuning:
    """How the parameters are tuned: ``warmup`` scores do not count; a sample lasts ``steps`` steps.

    The search makes ``most`` trials, with this ``noise`` of the scores, and writes them to the file ``log``, "" for
    none. Parameters with names in ``fixed`` stay, because the user has set them.
    """

    log: str = ""
    warmup: int = 3
    steps: int = 10
    most: int = 20
    noise: float = 0.8
    fixed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MpiChoice:
    """Whether the user asks for MPI: for tensors on CPUs or GPUs, or as the way on which the ranks find one another.

    Without ``has_threads``, MPI is asked for no more than calls of one thread at a time.
    """

    is_asked: bool
    has_threads: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> MpiChoice:
        """Read the variables of ``environment``. Raises SettingsError."""
        return cls.of(_Reader(environment))

    @classmethod
    def of(cls, read: _Reader) -> MpiChoice:
        """As :meth:`from_environment`."""
        # Our launchers set HOROVOD_CONTROLLER=gloo, which is close to the method here.
        controller = read("HOROVOD_CONTROLLER", _one_of("gloo", "mpi"), "gloo")
        on_host = read("HOROVOD_CPU_OPERATIONS", _cpu_operations, "auto")
        on_gpu = read("HOROVOD_GPU_OPERATIONS", _gpu_operations, "nccl")
        return cls("mpi" in (controller, on_host, on_gpu), not read("HOROVOD_MPI_THREADS_DISABLE", _flag, False))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the engine of a rank.

    With ``tcp_tls`` the TCP connections that carry tensors are encrypted. ``fusion_threshold`` is in bytes (0 means no
    fusion), ``cycle_time`` in seconds (None: by the number of cores), ``cache_capacity`` in tensor names (0 means no
    cache). ``hierarchical_allreduce`` and ``hierarchical_allgather`` are None where the hosts decide. With
    ``torus_allreduce`` tensors on GPUs go in stages, too, by NCCL in each of them. ``thread_affinity`` is the core for
    the communication thread (None: any). A tensor that waits for ranks is reported every ``stall_warning`` seconds
    (None: never), and after ``stall_shutdown`` seconds (0: never) it ends the job. Without ``group_fusion`` the tensors
    of a group travel apart from others. ``timeline`` is the path of the file for the timeline, "" for none, and
    ``timeline_mark_cycles`` says whether it has the decisions as cycles. ``autotune`` is None where the parameters are
    not tuned. Metrics are served at ``metrics_address`` and ``metrics_port``, which is that of this rank; 0 for none.
    ``dashboard`` is the id of the job that shows a live page, and after an @ the address of its store, if that is not
    the one of the job; "" for no page. With ``xla_ops`` TensorFlow's compiled functions may have collectives. With
    ``keep_freed_memory`` malloc gives back little to the kernel. With ``async_completion`` the streams of a GPU wait
    for operations, without it the callers do. ``gpu_operations`` is "nccl", the library for copies on the host, or
    "host": that for tensors on the host. ``remarks`` are sentences for the user about variables that have no effect.
    """

    secret: bytes = field(default=b"", repr=False)
    interface: str = ""
    cpu_operations: str = "auto"
    gpu_operations: str = "nccl"
    tcp_tls: bool = False
    mpi: MpiChoice = field(default_factory=lambda: MpiChoice(False, True))
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    torus_allreduce: bool = False
    fusion_threshold: int = 128 * MEBIBYTE
    cycle_time: float | None = None
    cache_capacity: int = 1024
    log_level: str = "warning"
    log_hide_time: bool = False
    thread_affinity: int | None = None
    stall_warning: float | None = 60.0
    stall_shutdown: float = 0.0
    group_fusion: bool = True
    async_completion: bool = True
    dynamic_process_sets: bool = True
    xla_ops: bool = True
    keep_freed_memory: bool = True
    timeline: str = ""
    timeline_mark_cycles: bool = False
    autotune: Autotuning | None = None
    metrics_address: str = LOOPBACK
    metrics_port: int = 0
    dashboard: str = ""
    remarks: tuple[str, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def operation_limit(self) -> str:
        """The variable that bounds the time that an operation waits for a rank."""
        is_stall = 0 < self.stall_shutdown <= self.timeouts.collective
        return "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" if is_stall else "HOROVOD_GLOO_TIMEOUT_SECONDS"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], topology: Topology | None = None) -> Settings:
        """Read the variables of ``environment``; SettingsError names the variable, its value and the allowed values.

        ``topology`` is the place of this rank where that is no longer the one in ``environment``.
        """
        read = _Reader(environment)
        timeout = read("HOROVOD_GLOO_TIMEOUT_SECONDS", _seconds, 30.0)
        local_rank, local_size = _local_place(read) if topology is None else (topology.local_rank, topology.local_size)
        stall_warning, stall_shutdown, stall_remarks = _stall_times(read)
        return cls(
            secret=read(ENVIRONMENT_SECRET, _base64, b"", show=False),
            interface=read("HOROVOD_GLOO_IFACE", str, ""),
            cpu_operations=read("HOROVOD_CPU_OPERATIONS", _cpu_operations, "auto"),
            tcp_tls=read("HVD_TCP_TLS", _switch, False),
            gpu_operations=read("HOROVOD_GPU_OPERATIONS", _gpu_operations, "nccl"),
            mpi=MpiChoice.of(read),
            hierarchical_allreduce=read("HOROVOD_HIERARCHICAL_ALLREDUCE", _flag, None),
            hierarchical_allgather=read("HOROVOD_HIERARCHICAL_ALLGATHER", _flag, None),
            torus_allreduce=read("HOROVOD_TORUS_ALLREDUCE", _flag, False),
            fusion_threshold=read("HOROVOD_FUSION_THRESHOLD", _natural, 128 * MEBIBYTE),
            cycle_time=read("HOROVOD_CYCLE_TIME", _milliseconds, None),
            cache_capacity=read("HOROVOD_CACHE_CAPACITY", _natural, 1024),
            log_level=read.or_default(
                "HOROVOD_LOG_LEVEL", _one_of("trace", "debug", "info", "warning", "error", "fatal"), "warning"
            ),
            log_hide_time=read.or_default("HOROVOD_LOG_HIDE_TIME", _flag, False),
            thread_affinity=read("HOROVOD_THREAD_AFFINITY", _core_of(local_rank, local_size), None),
            stall_warning=stall_warning,
            stall_shutdown=stall_shutdown,
            group_fusion=not read("HOROVOD_DISABLE_GROUP_FUSION", _flag, False),
            async_completion=read("HOROVOD_ENABLE_ASYNC_COMPLETION", _flag, True),
            dynamic_process_sets=read("HOROVOD_DYNAMIC_PROCESS_SETS", _flag, True),
            xla_ops=read("HOROVOD_ENABLE_XLA_OPS", _flag, True),
            keep_freed_memory=read("HVD_KEEP_FREED_MEMORY", _switch, True),
            timeline=read("HOROVOD_TIMELINE", _timeline, ""),
            timeline_mark_cycles=read.or_default("HOROVOD_TIMELINE_MARK_CYCLES", _flag, False),
            autotune=_autotuning(read),
            metrics_address=read("HVD_METRICS_ADDRESS", str, LOOPBACK),
            metrics_port=read.or_default("HVD_METRICS_PORT", _port_of(local_rank, local_size), 0),
            dashboard=read("HVD_DASHBOARD", str, ""),
            remarks=(*stall_remarks, *read.remarks, *_remarks(read)),
            timeouts=Timeouts(
                connect=timeout,
                collective=min(timeout, stall_shutdown or timeout),
                heartbeat=read("HOROVOD_HEARTBEAT_SECONDS", _seconds, 5.0),
            ),
        )


def world_from_environment(environment: Mapping[str, str]) -> World:
    """The world that the launcher describes in the variables of ``environment``; raises SettingsError.

    Without a launcher it is a world of one.
    """
    read = _Reader(environment)
    address = read("HOROVOD_GLOO_RENDEZVOUS_ADDR", str, "")
    port = read("HOROVOD_GLOO_RENDEZVOUS_PORT", _port, 0)
    local_rank, local_size = _local_place(read)
    topology = Topology(
        rank=read("HOROVOD_RANK", _natural, 0),
        size=read("HOROVOD_SIZE", _positive, 1),
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=read("HOROVOD_CROSS_RANK", _natural, 0),
        cross_size=read("HOROVOD_CROSS_SIZE", _positive, 1),
        hosts=(),
        cores=0,
    )
    return World(
        job=read("HOROVOD_JOB_ID", _job, "job"),
        round=read("HOROVOD_ROUND", _natural, 0),
        topology=topology,
        host=read("HOROVOD_HOSTNAME", str, "") or socket.gethostname(),
        rendezvous=(address, port) if address else None,
    )


def _local_place(read: _Reader) -> tuple[int, int]:
    return read("HOROVOD_LOCAL_RANK", _natural, 0), read("HOROVOD_LOCAL_SIZE", _positive, 1)


def _job(text: str) -> str:
    if len(text) > LONGEST_JOB or not text.isprintable():
        raise ValueError(f"printable text of at most {LONGEST_JOB} characters")
    return text


def _stall_times(read: _Reader) -> tuple[float | None, float, list[str]]:
    disabled = read("HOROVOD_STALL_CHECK_DISABLE", _flag, False)
    warning = read("HOROVOD_STALL_CHECK_TIME_SECONDS", _seconds, 60.0)
    shutdown = read("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _seconds_or_never, 0.0)
    if disabled:
        return None, 0.0, []
    if shutdown == 0 or shutdown > warning:
        return warning, shutdown, []
    remark = (
        f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is {shutdown:g}, but must be more than the {warning:g} s of "
        "HOROVOD_STALL_CHECK_TIME_SECONDS; it is ignored"
    )
    return warning, 0.0, [remark]


def _autotuning(read: _Reader) -> Autotuning | None:
    if not read.or_default("HOROVOD_AUTOTUNE", _flag, False):
        return None
    return Autotuning(
        log=read("HOROVOD_AUTOTUNE_LOG", str, ""),
        warmup=read.or_default("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", _natural, 3),
        steps=read.or_default("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", _positive, 10),
        most=read.or_default("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", _natural, 20),
        noise=read.or_default("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", _share, 0.8),
        fixed=frozenset(name for variable, names in TUNED.items() if read(variable, str, "") for name in names),
    )


def _timeline(text: str) -> str:
    """DYNAMIC means that only ``start_timeline`` begins one, which needs no variable here."""
    return "" if text == DYNAMIC_TIMELINE else text


def _cpu_operations(text: str) -> str:
    chosen = _one_of("auto", *CPU_OPERATIONS, *CPU_OPERATIONS_NOT_YET)(text)
    return "auto" if chosen in CPU_OPERATIONS_NOT_YET else chosen


def _gpu_operations(text: str) -> str:
    chosen = _one_of("auto", "nccl", "host", *GPU_OPERATIONS_BY_HOST)(text)
    return "nccl" if chosen == "auto" else chosen


def _remarks(read: _Reader) -> tuple[str, ...]:
    unused = [variable for variable in UNUSED if read(variable, str, "0") != "0"]
    chosen = read("HOROVOD_CPU_OPERATIONS", str, "").lower()
    ignored = [chosen] if chosen in CPU_OPERATIONS_NOT_YET else []
    readable = _readable(read) if read("HVD_TCP_TLS", _flag, False) else []
    return (
        *(f"{variable} is set, but has no counterpart here; it is ignored" for variable in unused),
        *(f"HOROVOD_CPU_OPERATIONS is {value}, which does not exist here yet; it means auto" for value in ignored),
        *(f"HVD_TCP_TLS encrypts tensors that travel by tcp, but not those of {choice}" for choice in readable),
    )


def _readable(read: _Reader) -> list[str]:
    """The choices by which tensors travel on connections that are not ours."""
    chosen = {name: read(name, str, "").lower() for name in ("HOROVOD_CPU_OPERATIONS", "HOROVOD_GPU_OPERATIONS")}
    return [f"{name}={value}" for name, value in chosen.items() if value in FOREIGN]


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.remarks: list[str] = []

    def __call__(self, variable: str, parse: Callable[[str], T], default: T, show: bool = True) -> T:
        text = self._environment.get(variable, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            shown = repr(text) if show else "a value that is not shown"
            raise SettingsError(f"{variable} is {shown}, but must be {error}") from None

    def or_default(self, variable: str, parse: Callable[[str], Plain], default: Plain) -> Plain:
        """A value that is not allowed is a remark: no observer may end the job, nor may its next world."""
        try:
            return self(variable, parse, default)
        except SettingsError as error:
            self.remarks.append(f"{error}; {default if isinstance(default, str) else f'{default:g}'} is used")
            return default


def _integer(text: str, least: float, allowed: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(allowed) from None
    if value < least:
        raise ValueError(allowed)
    return value


def _natural(text: str) -> int:
    return _integer(text, 0, "an integer of at least 0")


def _positive(text: str) -> int:
    return _integer(text, 1, "an integer of at least 1")


def _port(text: str) -> int:
    allowed = "a port number, 0 to 65535"
    value = _integer(text, 0, allowed)
    if value > 65535:
        raise ValueError(allowed)
    return value


def _port_of(local_rank: int, local_size: int) -> Callable[[str], int]:
    """Reads the port of the first rank of a host; the others have those that follow."""

    def parse(text: str) -> int:
        allowed = f"a port number with {local_size} for the ranks of this host up to 65535, or 0 for none"
        first = _integer(text, 0, allowed)
        if first + local_size - 1 > 65535:
            raise ValueError(allowed)
        return first + local_rank if first else 0

    return parse


def _number(text: str, most: float, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(allowed) from None
    if not 0 <= value <= most:
        raise ValueError(allowed)
    return value


def _milliseconds(text: str) -> float:
    most = LONGEST_SECONDS * 1000
    return _number(text, most, f"a number of milliseconds, 0 to {most}") / 1000.0


def _share(text: str) -> float:
    return _number(text, 1.0, "a number from 0 to 1")


def _seconds(text: str) -> float:
    allowed = f"a positive number of seconds, at most {LONGEST_SECONDS}"
    value = _number(text, LONGEST_SECONDS, allowed)
    if value == 0:
        raise ValueError(allowed)
    return value


def _seconds_or_never(text: str) -> float:
    return _number(text, LONGEST_SECONDS, f"a number of seconds, at most {LONGEST_SECONDS}, or 0 for never")


def _flag(text: str) -> bool:
    """Any integer, as for Horovod, which takes those above 0 for 1."""
    return _integer(text, -math.inf, "0 or 1") > 0


def _switch(text: str) -> bool:
    """0 or 1 alone: a typing error must not switch a protection off."""
    return _one_of("0", "1")(text) == "1"


def _core_of(local_rank: int, local_size: int) -> Callable[[str], int | None]:
    """Reads a list of cores, one for each rank of this host; each rank validates its own, which only it can do."""

    def parse(text: str) -> int:
        usable = sorted(os.sched_getaffinity(0))
        allowed = (
            f"core numbers with commas between them, at least {local_size}, one for each rank of this host; "
            f"local rank {local_rank} may use the cores {', '.join(map(str, usable))}"
        )
        cores = [_integer(entry, 0, allowed) for entry in text.split(",")]
        if len(cores) < local_size or local_rank >= len(cores) or cores[local_rank] not in usable:
            raise ValueError(allowed)
        return cores[local_rank]

    return parse


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("base64, as the launcher made it") from None


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError("one of: " + ", ".join(allowed))
        return text.lower()

    return parse
