"""Each variable: what it becomes, and what is said about a bad value."""

import base64
import socket
from dataclasses import FrozenInstanceError

import pytest

from collectives.api import SettingsError, Timeouts
from collectives.settings import ENVIRONMENT_SECRET, Settings

SECRET = b"\x00not to be seen\xff"
LAUNCHED = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}

GOOD = [
    ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", **LAUNCHED}, "rank", 2),
    ({"HOROVOD_SIZE": " 3 ", **LAUNCHED}, "size", 3),
    ({"HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}, "local_rank", 1),
    ({"HOROVOD_LOCAL_SIZE": "2"}, "local_size", 2),
    ({"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2"}, "cross_rank", 1),
    ({"HOROVOD_CROSS_SIZE": "2"}, "cross_size", 2),
    ({"HOROVOD_HOSTNAME": "node-7"}, "hostname", "node-7"),
    (LAUNCHED, "rendezvous_address", "10.0.0.1"),
    (LAUNCHED, "rendezvous_port", 4711),
    ({"HOROVOD_RENDEZVOUS_SCOPE": "mine"}, "rendezvous_scope", "mine"),
    ({ENVIRONMENT_SECRET: base64.b64encode(SECRET).decode()}, "secret", SECRET),
    ({"HOROVOD_GLOO_IFACE": "eth0"}, "interface", "eth0"),
    ({"HOROVOD_CPU_OPERATIONS": "GLOO"}, "cpu_operations", "gloo"),
    ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "hierarchical_allreduce", True),
    ({"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}, "hierarchical_allgather", False),
    ({}, "hierarchical_allreduce", None),
    ({"HOROVOD_FUSION_THRESHOLD": "0"}, "fusion_threshold", 0),
    ({"HOROVOD_CYCLE_TIME": "2.5"}, "cycle_time", 0.0025),
    ({"HOROVOD_CACHE_CAPACITY": "16"}, "cache_capacity", 16),
    ({"HOROVOD_LOG_LEVEL": "Debug"}, "log_level", "debug"),
    ({"HOROVOD_LOG_HIDE_TIME": "1"}, "log_hide_time", True),
    ({"HOROVOD_LOG_HIDE_TIME": "0"}, "log_hide_time", False),
    ({"HOROVOD_CCL_CACHE": "1", "HOROVOD_CONTROLLER": "gloo"}, "unused", ("HOROVOD_CCL_CACHE",)),
    ({"HOROVOD_CONTROLLER": "MPI"}, "unused", ("HOROVOD_CONTROLLER",)),
    ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "1.5"}, "timeouts", Timeouts(connect=1.5, collective=1.5)),
]

NATURAL = ("x", "1.5", "-1", "inf")
BAD = {
    "HOROVOD_RANK": (NATURAL, "an integer of at least 0"),
    "HOROVOD_SIZE": ((*NATURAL, "0"), "an integer of at least 1"),
    "HOROVOD_LOCAL_RANK": (NATURAL, "an integer of at least 0"),
    "HOROVOD_LOCAL_SIZE": ((*NATURAL, "0"), "an integer of at least 1"),
    "HOROVOD_CROSS_RANK": (NATURAL, "an integer of at least 0"),
    "HOROVOD_CROSS_SIZE": ((*NATURAL, "0"), "an integer of at least 1"),
    "HOROVOD_GLOO_RENDEZVOUS_PORT": ((*NATURAL, "65536"), "a port number, 0 to 65535"),
    "HOROVOD_CPU_OPERATIONS": (("mpi", "auto gloo"), "one of: auto, shm, gloo"),
    "HOROVOD_FUSION_THRESHOLD": (NATURAL, "an integer of at least 0"),
    "HOROVOD_CYCLE_TIME": (("x", "-1", "nan", "inf"), "a number of milliseconds of at least 0"),
    "HOROVOD_CACHE_CAPACITY": (NATURAL, "an integer of at least 0"),
    "HOROVOD_LOG_LEVEL": (("loud",), "one of: trace, debug, info, warning, error, fatal"),
    "HOROVOD_CONTROLLER": (("nccl",), "one of: gloo, mpi"),
    "HOROVOD_LOG_HIDE_TIME": (("yes", "-1"), "0 or 1"),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": (("x", "0", "-1", "nan", "inf"), "a positive number of seconds"),
}


@pytest.mark.parametrize(("environment", "name", "value"), GOOD, ids=lambda value: value if type(value) is str else "")
def test_a_variable_becomes_a_setting(environment, name, value):
    assert getattr(Settings.from_environment(environment), name) == value


def test_every_setting_has_a_variable():
    assert {name for _, name, _ in GOOD} == set(Settings.__dataclass_fields__)


@pytest.mark.parametrize("variable", BAD)
def test_a_bad_value_is_named_with_what_is_allowed(variable):
    values, allowed = BAD[variable]
    for value in values:
        with pytest.raises(SettingsError) as caught:
            Settings.from_environment({variable: value})
        assert str(caught.value) == f"{variable} is {value!r}, but must be {allowed}"


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_is_an_absent_one(empty):
    environment = dict.fromkeys([*BAD, ENVIRONMENT_SECRET, "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_HOSTNAME"], empty)
    assert Settings.from_environment(environment) == Settings.from_environment({})


def test_without_a_launcher_this_is_a_world_of_one():
    settings = Settings.from_environment({})
    assert settings == Settings(hostname=socket.gethostname())
    assert (settings.rank, settings.size, settings.rendezvous_address) == (0, 1, None)


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


@pytest.mark.parametrize("kind", ["", "LOCAL_", "CROSS_"])
def test_a_rank_is_below_its_size(kind):
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({f"HOROVOD_{kind}RANK": "3", f"HOROVOD_{kind}SIZE": "3", **LAUNCHED})
    text = str(caught.value)
    assert f"{kind.lower()}rank 3 is not in 0..2" in text
    assert f"HOROVOD_{kind}RANK and HOROVOD_{kind}SIZE" in text


def test_several_ranks_need_a_launcher():
    with pytest.raises(SettingsError, match=r"size is 2 but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set.*hvdrun"):
        Settings.from_environment({"HOROVOD_SIZE": "2"})


def test_settings_do_not_change():
    with pytest.raises(FrozenInstanceError):
        Settings().rank = 1


@pytest.mark.parametrize("name", ["connect", "collective", "shutdown"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_timeouts_are_positive(name, value):
    with pytest.raises(SettingsError, match=f"timeout {name}={value!r} must be a positive number of seconds"):
        Timeouts(**{name: value})
