"""Each variable: what it becomes, and what is said about a bad value."""

import base64
import os
import re
import socket
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from collectives import settings
from collectives.api import SettingsError, Timeouts, World
from collectives.settings import ENVIRONMENT_SECRET, Autotuning, MpiChoice, Settings, world_from_environment

SECRET = b"\x00not to be seen\xff"
LAUNCHED = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}
LOCAL_RANK_1 = {"HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
CORE = min(os.sched_getaffinity(0))
UNUSED = "is set, but has no counterpart here; it is ignored"

GOOD = [
    ({ENVIRONMENT_SECRET: base64.b64encode(SECRET).decode()}, "secret", SECRET),
    ({"HOROVOD_GLOO_IFACE": "eth0"}, "interface", "eth0"),
    ({"HOROVOD_CPU_OPERATIONS": "GLOO"}, "cpu_operations", "gloo"),
    ({"HOROVOD_CPU_OPERATIONS": "tcp"}, "cpu_operations", "tcp"),
    ({"HOROVOD_GPU_OPERATIONS": "host"}, "gpu_operations", "host"),
    ({"HOROVOD_GPU_OPERATIONS": "PyGloo"}, "gpu_operations", "pygloo"),
    ({"HOROVOD_GPU_OPERATIONS": "auto"}, "gpu_operations", "nccl"),
    ({"HVD_TCP_TLS": "1"}, "tcp_tls", True),
    ({}, "keep_freed_memory", True),
    ({"HVD_KEEP_FREED_MEMORY": "0"}, "keep_freed_memory", False),
    ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "hierarchical_allreduce", True),
    ({"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}, "hierarchical_allgather", False),
    ({}, "hierarchical_allreduce", None),
    ({"HOROVOD_TORUS_ALLREDUCE": "1"}, "torus_allreduce", True),
    ({"HOROVOD_TORUS_ALLREDUCE": "1"}, "remarks", ()),
    ({"HOROVOD_FUSION_THRESHOLD": "0"}, "fusion_threshold", 0),
    ({"HOROVOD_CYCLE_TIME": "2.5"}, "cycle_time", 0.0025),
    ({"HOROVOD_CACHE_CAPACITY": "16"}, "cache_capacity", 16),
    ({"HOROVOD_LOG_LEVEL": "Debug"}, "log_level", "debug"),
    ({"HOROVOD_LOG_HIDE_TIME": "1"}, "log_hide_time", True),
    ({"HOROVOD_LOG_HIDE_TIME": "0"}, "log_hide_time", False),
    ({"HOROVOD_LOG_HIDE_TIME": "-1"}, "log_hide_time", False),
    ({"HOROVOD_LOG_HIDE_TIME": "2"}, "log_hide_time", True),
    ({"HOROVOD_THREAD_AFFINITY": str(CORE)}, "thread_affinity", CORE),
    ({"HOROVOD_THREAD_AFFINITY": f"{CORE}, 99999"}, "thread_affinity", CORE),
    ({"HOROVOD_THREAD_AFFINITY": f"99999,{CORE}", **LOCAL_RANK_1}, "thread_affinity", CORE),
    ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "2.5"}, "stall_warning", 2.5),
    ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, "stall_warning", None),
    ({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, "stall_shutdown", 0.0),
    ({"HOROVOD_STALL_CHECK_DISABLE": "0", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, "stall_shutdown", 90.0),
    ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"}, "stall_shutdown", 0.0),
    ({"HOROVOD_DISABLE_GROUP_FUSION": "1"}, "group_fusion", False),
    ({"HOROVOD_ENABLE_ASYNC_COMPLETION": "0"}, "async_completion", False),
    ({"HOROVOD_DYNAMIC_PROCESS_SETS": "0"}, "dynamic_process_sets", False),
    ({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, "dynamic_process_sets", True),
    ({"HOROVOD_ENABLE_XLA_OPS": "0"}, "xla_ops", False),
    ({"HOROVOD_ENABLE_XLA_OPS": "1"}, "xla_ops", True),
    ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "1.5"}, "timeouts", Timeouts(connect=1.5, collective=1.5)),
    ({"HOROVOD_HEARTBEAT_SECONDS": "0.5"}, "timeouts", Timeouts(heartbeat=0.5)),
    ({"HOROVOD_CONTROLLER": "gloo"}, "remarks", ()),
    ({"HOROVOD_ELASTIC": "1", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "remarks", ()),
    ({"HOROVOD_AUTOTUNE": "0", "HOROVOD_AUTOTUNE_LOG": "log"}, "autotune", None),
    ({"HOROVOD_AUTOTUNE": "1"}, "autotune", Autotuning()),
    (
        {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": "log",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "0",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "7",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "9",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.25",
        },
        "autotune",
        Autotuning("log", 0, 7, 9, 0.25),
    ),
    (
        {"HOROVOD_AUTOTUNE": "1", "HOROVOD_CYCLE_TIME": "3", "HOROVOD_CACHE_CAPACITY": "9"},
        "autotune",
        Autotuning(fixed=frozenset(["cycle_time", "patient", "patience", "cache_capacity"])),
    ),
    ({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "-1"}, "autotune", Autotuning()),
    (
        {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "0",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "2",
        },
        "remarks",
        (
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE is '0', but must be an integer of at least 1; 10 is used",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE is '2', but must be a number from 0 to 1; 0.8 is used",
        ),
    ),
    ({"HOROVOD_AUTOTUNE": "yes"}, "autotune", None),
    ({"HOROVOD_AUTOTUNE": "yes"}, "remarks", ("HOROVOD_AUTOTUNE is 'yes', but must be 0 or 1; 0 is used",)),
    ({"HOROVOD_CPU_OPERATIONS": "MPI"}, "cpu_operations", "mpi"),
    ({"HOROVOD_CPU_OPERATIONS": "mpi"}, "mpi", MpiChoice(is_asked=True, has_threads=True)),
    ({"HOROVOD_GPU_OPERATIONS": "MPI"}, "mpi", MpiChoice(is_asked=True, has_threads=True)),
    ({"HOROVOD_GPU_OPERATIONS": "host"}, "mpi", MpiChoice(is_asked=False, has_threads=True)),
    (
        {"HOROVOD_CONTROLLER": "MPI", "HOROVOD_MPI_THREADS_DISABLE": "1"},
        "mpi",
        MpiChoice(is_asked=True, has_threads=False),
    ),
    ({"HOROVOD_CONTROLLER": "gloo"}, "mpi", MpiChoice(is_asked=False, has_threads=True)),
    (
        {"HOROVOD_CPU_OPERATIONS": "ccl"},
        "remarks",
        ("HOROVOD_CPU_OPERATIONS is ccl, which does not exist here yet; it means auto",),
    ),
    ({"HOROVOD_CPU_OPERATIONS": "gloo"}, "remarks", ()),
    ({"HVD_TCP_TLS": "1", "HOROVOD_CPU_OPERATIONS": "tcp", "HOROVOD_GPU_OPERATIONS": "host"}, "remarks", ()),
    (
        {"HVD_TCP_TLS": "1", "HOROVOD_CPU_OPERATIONS": "Gloo", "HOROVOD_GPU_OPERATIONS": "mpi"},
        "remarks",
        (
            "HVD_TCP_TLS encrypts tensors that travel by tcp, but not those of HOROVOD_CPU_OPERATIONS=gloo",
            "HVD_TCP_TLS encrypts tensors that travel by tcp, but not those of HOROVOD_GPU_OPERATIONS=mpi",
        ),
    ),
    ({"HOROVOD_TIMELINE": "trace.json"}, "timeline", "trace.json"),
    ({"HOROVOD_TIMELINE": "DYNAMIC"}, "timeline", ""),
    ({"HVD_METRICS_ADDRESS": "0.0.0.0"}, "metrics_address", "0.0.0.0"),
    ({"HVD_METRICS_PORT": "9400"}, "metrics_port", 9400),
    ({"HVD_METRICS_PORT": "9400", **LOCAL_RANK_1}, "metrics_port", 9401),
    ({"HVD_METRICS_PORT": "0", **LOCAL_RANK_1}, "metrics_port", 0),
    ({"HVD_METRICS_PORT": "65535", **LOCAL_RANK_1}, "metrics_port", 0),
    (
        {"HVD_METRICS_PORT": "http"},
        "remarks",
        (
            "HVD_METRICS_PORT is 'http', but must be a port number with 1 for the ranks of this host up to 65535, or 0 "
            "for none; 0 is used",
        ),
    ),
    (
        {"HOROVOD_TIMELINE_MARK_CYCLES": "yes"},
        "remarks",
        ("HOROVOD_TIMELINE_MARK_CYCLES is 'yes', but must be 0 or 1; 0 is used",),
    ),
    (
        {"HOROVOD_LOG_LEVEL": "loud", "HOROVOD_LOG_HIDE_TIME": "yes"},
        "remarks",
        (
            "HOROVOD_LOG_LEVEL is 'loud', but must be one of: trace, debug, info, warning, error, fatal; "
            "warning is used",
            "HOROVOD_LOG_HIDE_TIME is 'yes', but must be 0 or 1; 0 is used",
        ),
    ),
    ({"HVD_DASHBOARD": "1916b312250d@10.0.0.1:80"}, "dashboard", "1916b312250d@10.0.0.1:80"),
    ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, "timeline_mark_cycles", True),
    (
        {"HOROVOD_CCL_CACHE": "1", "HOROVOD_BATCH_D2D_MEMCOPIES": "1"},
        "remarks",
        (f"HOROVOD_BATCH_D2D_MEMCOPIES {UNUSED}", f"HOROVOD_CCL_CACHE {UNUSED}"),
    ),
    (
        {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"},
        "remarks",
        (
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is 20, but must be more than the 60 s of "
            "HOROVOD_STALL_CHECK_TIME_SECONDS; it is ignored",
        ),
    ),
]

NATURAL = ("x", "1.5", "-1", "inf")
SECONDS = ("x", "0", "-1", "nan", "inf", "1000001", "3e6")
BAD = {
    "HOROVOD_RANK": (NATURAL, "an integer of at least 0"),
    "HOROVOD_SIZE": ((*NATURAL, "0"), "an integer of at least 1"),
    "HOROVOD_LOCAL_RANK": (NATURAL, "an integer of at least 0"),
    "HOROVOD_LOCAL_SIZE": ((*NATURAL, "0"), "an integer of at least 1"),
    "HOROVOD_CROSS_RANK": (NATURAL, "an integer of at least 0"),
    "HOROVOD_CROSS_SIZE": ((*NATURAL, "0"), "an integer of at least 1"),
    "HOROVOD_GLOO_RENDEZVOUS_PORT": ((*NATURAL, "65536"), "a port number, 0 to 65535"),
    "HOROVOD_GPU_OPERATIONS": (("shm", "ccl"), "one of: auto, nccl, host, tcp, gloo, pygloo, mpi"),
    "HOROVOD_CPU_OPERATIONS": (("nccl", "auto gloo"), "one of: auto, shm, tcp, gloo, pygloo, mpi, ccl"),
    "HOROVOD_FUSION_THRESHOLD": (NATURAL, "an integer of at least 0"),
    "HOROVOD_CYCLE_TIME": (("x", "-1", "nan", "inf", "1000000001"), "a number of milliseconds, 0 to 1000000000"),
    "HOROVOD_CACHE_CAPACITY": (NATURAL, "an integer of at least 0"),
    "HOROVOD_CONTROLLER": (("nccl",), "one of: gloo, mpi"),
    "HOROVOD_DISABLE_GROUP_FUSION": (("yes",), "0 or 1"),
    "HOROVOD_ENABLE_ASYNC_COMPLETION": (("maybe",), "0 or 1"),
    "HOROVOD_DYNAMIC_PROCESS_SETS": (("dynamic",), "0 or 1"),
    "HOROVOD_ENABLE_XLA_OPS": (("on",), "0 or 1"),
    "HOROVOD_STALL_CHECK_DISABLE": (("no",), "0 or 1"),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": (SECONDS, "a positive number of seconds, at most 1000000"),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": (
        ("x", "-1", "nan", "inf", "1000001"),
        "a number of seconds, at most 1000000, or 0 for never",
    ),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": (SECONDS, "a positive number of seconds, at most 1000000"),
    "HOROVOD_HEARTBEAT_SECONDS": (SECONDS, "a positive number of seconds, at most 1000000"),
}


@pytest.mark.parametrize(("environment", "name", "value"), GOOD, ids=lambda value: value if type(value) is str else "")
def test_a_variable_becomes_a_setting(environment, name, value):
    assert getattr(Settings.from_environment(environment), name) == value


@pytest.mark.parametrize(("shutdown", "limit"), [("0", 50.0), ("90", 50.0), ("20", 20.0)])
def test_the_time_after_which_a_stall_ends_the_job_bounds_operations_too(shutdown, limit):
    """A rank that is stopped inside an operation submits nothing late, so no stall check sees it."""
    environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "50", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}
    timeouts = Settings.from_environment(environment | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": shutdown}).timeouts
    assert (timeouts.connect, timeouts.collective) == (50.0, limit)


def test_every_setting_has_a_variable():
    assert {name for _, name, _ in GOOD} == set(Settings.__dataclass_fields__)


def test_every_variable_is_explained():
    class Reads(dict):
        def get(self, variable, default=None):
            read.add(variable)
            return default

    read = set()
    Settings.from_environment(Reads())
    world_from_environment(Reads())
    page = (Path(__file__).parents[2] / "docs" / "variables.md").read_text()
    assert not {variable for variable in read - set(settings.UNUSED) if f"`{variable}`" not in page}


def read_all(environment):
    return Settings.from_environment(environment), world_from_environment(environment)


@pytest.mark.parametrize("variable", BAD)
def test_a_bad_value_is_named_with_what_is_allowed(variable):
    values, allowed = BAD[variable]
    for value in values:
        with pytest.raises(SettingsError) as caught:
            read_all({variable: value})
        assert str(caught.value) == f"{variable} is {value!r}, but must be {allowed}"


@pytest.mark.parametrize("cores", ["x", "-1", "99999", f"99999,{CORE}", "", f"{CORE};1"])
def test_a_core_must_be_there(cores):
    with pytest.raises(
        SettingsError, match=r"but must be core numbers .* at least 1, .* local rank 0 may use the cores"
    ):
        Settings.from_environment({"HOROVOD_THREAD_AFFINITY": f"{cores},"})


def test_every_rank_of_a_host_needs_a_core():
    with pytest.raises(SettingsError, match=f"HOROVOD_THREAD_AFFINITY is '{CORE}', but must be .* at least 2, one for"):
        Settings.from_environment({"HOROVOD_THREAD_AFFINITY": str(CORE), **LOCAL_RANK_1, "HOROVOD_LOCAL_RANK": "0"})
    with pytest.raises(SettingsError, match="HOROVOD_LOCAL_RANK and HOROVOD_LOCAL_SIZE together"):
        world_from_environment({"HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_is_an_absent_one(empty):
    environment = dict.fromkeys([*BAD, ENVIRONMENT_SECRET, "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_HOSTNAME"], empty)
    assert Settings.from_environment(environment) == Settings.from_environment({})
    assert world_from_environment(environment) == world_from_environment({})


def test_without_a_launcher_this_is_a_world_of_one():
    assert Settings.from_environment({}) == Settings()
    assert world_from_environment({}) == World(host=socket.gethostname())


@pytest.mark.parametrize("value", ["-1", "2", "yes", "01"])
def test_encryption_is_on_or_off_and_nothing_else(value):
    with pytest.raises(SettingsError, match=f"HVD_TCP_TLS is '{value}', but must be one of: 0, 1"):
        Settings.from_environment({"HVD_TCP_TLS": value})


@pytest.mark.parametrize("secret", ["not base64: $", "geheim-\u00e4", "abc"])
def test_a_bad_secret_is_refused_but_not_shown(secret):
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({ENVIRONMENT_SECRET: secret})
    error = caught.value
    assert str(error) == (
        f"{ENVIRONMENT_SECRET} is a value that is not shown, but must be base64, as the launcher made it"
    )
    assert secret not in f"{error!r} {error.__cause__!r}"


def test_a_secret_is_not_printed():
    settings = Settings.from_environment({ENVIRONMENT_SECRET: base64.b64encode(SECRET).decode()})
    assert "seen" not in f"{settings!r} {settings}"
    assert base64.b64encode(SECRET).decode() not in repr(settings)


@pytest.mark.parametrize(
    ("environment", "read", "value"),
    [
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", **LAUNCHED}, lambda world: world.topology.rank, 2),
        ({"HOROVOD_SIZE": " 3 ", **LAUNCHED}, lambda world: world.topology.size, 3),
        ({"HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}, lambda world: world.topology.local_rank, 1),
        ({"HOROVOD_LOCAL_SIZE": "2"}, lambda world: world.topology.local_size, 2),
        ({"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2"}, lambda world: world.topology.cross_rank, 1),
        ({"HOROVOD_CROSS_SIZE": "2"}, lambda world: world.topology.cross_size, 2),
        ({"HOROVOD_HOSTNAME": "node-7"}, lambda world: world.host, "node-7"),
        (LAUNCHED, lambda world: world.rendezvous, ("10.0.0.1", 4711)),
        ({"HOROVOD_JOB_ID": "mine"}, lambda world: world.job, "mine"),
        ({"HOROVOD_ROUND": "4"}, lambda world: world.round, 4),
    ],
)
def test_the_launcher_describes_the_world(environment, read, value):
    assert read(world_from_environment(environment)) == value


def test_a_job_has_a_name_that_can_be_shown():
    with pytest.raises(SettingsError, match=r"HOROVOD_JOB_ID is .* but must be printable text"):
        world_from_environment({"HOROVOD_JOB_ID": "a\x00b"})


@pytest.mark.parametrize("kind", ["", "LOCAL_", "CROSS_"])
def test_a_rank_is_below_its_size(kind):
    with pytest.raises(SettingsError) as caught:
        world_from_environment({f"HOROVOD_{kind}RANK": "3", f"HOROVOD_{kind}SIZE": "3", **LAUNCHED})
    text = str(caught.value)
    assert f"{kind.lower()}rank 3 is not in 0..2" in text
    assert f"HOROVOD_{kind}RANK and HOROVOD_{kind}SIZE" in text


def test_several_ranks_need_a_launcher():
    with pytest.raises(SettingsError, match=r"size is 2 but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set.*hvdrun"):
        world_from_environment({"HOROVOD_SIZE": "2"})


def test_settings_do_not_change():
    with pytest.raises(FrozenInstanceError):
        Settings().interface = "lo"


@pytest.mark.parametrize("name", ["connect", "collective", "shutdown", "heartbeat"])
@pytest.mark.parametrize("value", [0, -1.0, 3e6, float("nan"), float("inf")])
def test_timeouts_are_positive(name, value):
    allowed = "must be a positive number of seconds, at most 1000000"
    with pytest.raises(SettingsError, match=re.escape(f"timeout {name}={value!r} {allowed}")):
        Timeouts(**{name: value})
